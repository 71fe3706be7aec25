"""What Prometheus reads from a service: counted once, with labels of few values, for who may."""

import math
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from storage.records import Record
from tasks.client import Child
from tasks.errors import Permanent, Transient
from tasks.service_contract import Health
from tasks.service_metrics import ServiceMetrics
from tests.unit.service.echo_stage import EchoRequest, EchoResult

Samples = dict[tuple[str, ...], float]


class Kept(Record):
    """What of a stage record the metrics read."""

    metrics: dict[str, float]


class Made(Record):
    """A stage's result."""

    record: Kept
    reused: bool


def samples(text: str) -> Samples:
    """All of an exposition, by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read(metrics: ServiceMetrics) -> Samples:
    return samples(metrics.exposition().decode())


@pytest.fixture
def counted() -> ServiceMetrics:
    return ServiceMetrics(
        lambda: Health(status="ready", message="", policy_version=7, policy_digest="d" * 64)
    )


def address(child: Child) -> tuple[str, str]:
    assert child._process is not None
    found = child._process.address()
    assert found is not None
    return found


def scrape(child: Child) -> Samples:
    url, token = address(child)
    answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.raise_for_status().text)


def test_calls_of_a_real_service_are_counted_by_kind_and_outcome(echo: Child) -> None:
    for text in ("12", "30"):
        echo.run(EchoRequest(text=text, seconds=0.06), EchoResult)
    with pytest.raises(Transient):
        echo.run(EchoRequest(do="unavailable"), EchoResult)
    with pytest.raises(Permanent):
        echo.run(EchoRequest(do="corrupt"), EchoResult)
    found = scrape(echo)
    assert found["rollbook_service_calls_total", "EchoRequest", "done"] == 2
    assert found["rollbook_service_calls_total", "EchoRequest", "transient"] == 1
    assert found["rollbook_service_calls_total", "EchoRequest", "permanent"] == 1
    # Two calls took 0.06 s and two none: 2 are within 0.05 s, and all within ten minutes.
    assert found["rollbook_service_call_seconds_bucket", "EchoRequest", "0.05"] == 2
    assert found["rollbook_service_call_seconds_count", "EchoRequest"] == 4
    assert found["rollbook_service_call_seconds_sum", "EchoRequest"] >= 0.12
    assert found["rollbook_service_ready",] == 1
    assert found["rollbook_service_in_flight",] == 0
    assert found["process_resident_memory_bytes",] > 1e6


def test_a_call_in_hand_and_those_that_wait_show_while_they_do(
    echo: Child, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    echo.wait_ready()
    slow = [EchoRequest(text=str(index), seconds=1.5) for index in range(3)]
    calls = [threading.Thread(target=echo.run, args=(one, EchoResult)) for one in slow]
    for call in calls:
        call.start()
    wait_until(lambda: scrape(echo)["rollbook_service_queue",] == 2)
    found = scrape(echo)
    assert found["rollbook_service_in_flight",] == 1
    assert found["rollbook_service_busy_seconds",] > 0
    for call in calls:
        call.join()
    assert scrape(echo)["rollbook_service_queue",] == 0


def test_a_stranger_reads_nothing_and_is_counted(echo: Child) -> None:
    echo.wait_ready()
    url, token = address(echo)
    assert httpx.get(f"{url}/metrics").status_code == 401
    wrong = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}x"})
    assert wrong.status_code == 401
    assert scrape(echo)["rollbook_service_refused_total", "token"] == 2


def test_what_a_caller_sends_never_becomes_a_label(echo: Child) -> None:
    echo.wait_ready()
    url, token = address(echo)
    headers = {"Authorization": f"Bearer {token}"}
    for index in range(5):
        call = {"type": f"Strange{index}", "request": {}}
        assert httpx.post(f"{url}/run", headers=headers, json=call).status_code == 424
    assert httpx.post(f"{url}/run", headers=headers, content=b"{").status_code == 422
    found = scrape(echo)
    assert not [key for key in found if any("Strange" in part for part in key)]
    assert found["rollbook_service_refused_total", "not admitted"] == 5
    assert found["rollbook_service_refused_total", "malformed"] == 1


def test_tokens_count_once_however_often_a_record_is_answered(counted: ServiceMetrics) -> None:
    kept = Kept(metrics={"prompt_tokens": 40.0, "completion_tokens": 25.0})
    for reused in (False, True, True):
        counted.counted(lambda _, reused=reused: Made(record=kept, reused=reused), EchoRequest())
    found = read(counted)
    assert found["rollbook_service_tokens_total", "EchoRequest", "completion"] == 25
    assert found["rollbook_service_tokens_total", "EchoRequest", "prompt"] == 40
    assert found["rollbook_service_calls_total", "EchoRequest", "reused"] == 2
    assert found["rollbook_service_calls_total", "EchoRequest", "done"] == 1


def test_health_is_what_it_is_at_the_scrape() -> None:
    now = [Health(status="starting", message="importing")]
    metrics = ServiceMetrics(lambda: now[0])
    before = read(metrics)
    assert before["rollbook_service_ready",] == 0
    assert before["rollbook_service_status", "starting"] == 1
    assert ("rollbook_service_policy_version",) not in before
    now[0] = Health(status="ready", message="", policy_version=12, busy_s=2.5, tokens_per_s=800.0)
    after = read(metrics)
    assert after["rollbook_service_ready",] == 1
    assert after["rollbook_service_policy_version",] == 12
    assert after["rollbook_service_busy_seconds",] == 2.5
    assert after["rollbook_service_tokens_per_second",] == 800
    assert math.isclose(sum(v for k, v in after.items() if k[0] == "rollbook_service_status"), 1)
    assert not [key for key in after if "d" * 64 in key]


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return wait
