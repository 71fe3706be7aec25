"""Engines as services and as flow runs of their own, on real work pools: the same bits."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flows.stores import resolve_store
from infra.daemons import recall
from infra.prefect_api import call
from infra.seaweedfs import s3_keys
from storage.opening import open_store
from tests.e2e.planted import CommandLines, holds, in_api, in_files, in_store
from tests.e2e.pool_stack import SMALL, Pools

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.s3]
STEPS = 5


@pytest.fixture(scope="module")
def local(pools: Pools) -> dict[str, Any]:
    """What the same run does with its engines beside it."""
    flow_run = pools.start("advance", run="beside", recipe="addition", steps=STEPS, overrides=SMALL)
    ended = pools.ends(flow_run)
    assert ended["type"] == "COMPLETED", ended
    return pools.show("beside")


@pytest.fixture(scope="module", autouse=True)
def commands() -> Iterator[set[str]]:
    """Command lines of all processes of this machine while these tests go on."""
    seen = CommandLines()
    with seen.watched():
        yield seen.seen


def at_step(pools: Pools, run: str, step: int, flow_run: str) -> None:
    """Waits for a commit."""
    deadline = time.monotonic() + 240
    file = pools.home / "logs" / run / f"flow-run-{flow_run}.log"
    while not file.is_file() or f"step {step}/" not in file.read_text():
        assert time.monotonic() < deadline, pools.state(flow_run)
        assert pools.state(flow_run)["type"] not in ("FAILED", "CANCELLED"), pools.state(flow_run)
        time.sleep(0.2)


def engine_of(lease: dict[str, Any]) -> psutil.Process:
    """The engine's process of a service: the flow's child that serves."""
    for child in psutil.Process(lease["pid"]).children(recursive=True):
        if "tasks.service" in child.cmdline():
            return child
    raise AssertionError(f"process {lease['pid']} has no engine")


def services(pools: Pools, run: str, stage: str) -> list[dict[str, Any]]:
    found = pools.leases(run)
    return [lease for role, lease in found.items() if role.startswith(f"{stage}-service-")]


def cancelled(pools: Pools, leases: list[dict[str, Any]]) -> None:
    for lease in leases:
        pools.cancel(lease["holder"]["flow_run_id"])


def check_metrics(pools: Pools, leases: list[dict[str, Any]], *, version: int) -> None:
    """Engines say in Prometheus' format what they serve and did; strangers are told nothing."""
    token = (pools.home / "service-token").read_text().strip()
    versions: dict[str, set[float | None]] = {"rollout": set(), "train": set()}
    for lease in leases:
        url = f"{lease['holder']['address']}/metrics"
        try:
            assert httpx.get(url).status_code == 401
        except httpx.ConnectError:
            continue  # It is the one that starts again.
        answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}).raise_for_status()
        families = text_string_to_metric_families(answer.text)
        samples = [sample for family in families for sample in family.samples]
        values = {sample.name: sample.value for sample in samples if not sample.labels}
        assert values["rollbook_service_queue"] == values["rollbook_service_in_flight"] == 0
        named = [sample.value for sample in samples if sample.labels.get("outcome") == "done"]
        if sum(named):
            stage = lease["role"].partition("-")[0]
            versions[stage].add(values.get("rollbook_service_policy_version"))
    assert versions["train"] == {None}, "a trainer serves no policy"
    # A sampler that did not evaluate still has the policy of the last step.
    assert versions["rollout"]
    assert versions["rollout"] <= {float(version - 1), float(version)}


def check_overview(pools: Pools, run: str) -> None:
    """The newest overview tells of the services that lived, with links to their flow runs."""
    wanted = {"artifacts": {"key": {"any_": [f"{run}-overview"]}}}
    [overview] = call(pools.api, "POST", "/artifacts/filter", wanted)
    _, _, table = overview["data"].partition("## Services")
    assert "[train-service-" in table, overview["data"]
    assert "[rollout-service-" in table, overview["data"]
    assert "/runs/flow-run/" in table


def test_services_that_die_or_hang_cost_nothing_but_time(
    pools: Pools, local: dict[str, Any], wait_for: Callable[[Callable[[], bool], float], None]
) -> None:
    placement = ["rollout=service", "train=service", "rollout_services=2", "stall_s=15"]
    overrides = [*SMALL, *(f"placement.{each}" for each in placement)]
    flow_run = pools.start(
        "advance", run="served", recipe="addition", steps=STEPS, overrides=overrides
    )
    wait_for(lambda: len(services(pools, "served", "rollout")) == 2, 120)
    first, second = services(pools, "served", "rollout")
    [trainer] = services(pools, "served", "train")
    killed, hung = engine_of(trainer), engine_of(second)
    at_step(pools, "served", 1, flow_run)
    os.kill(first["pid"], signal.SIGKILL)
    os.kill(killed.pid, signal.SIGKILL)
    os.kill(hung.pid, signal.SIGSTOP)
    ended = pools.ends(flow_run, timeout=300)
    assert ended["type"] == "COMPLETED", ended
    shown = pools.show("served")
    assert [step["step"] for step in shown["steps"]] == list(range(STEPS + 1))
    assert shown["policy_digest"] == local["policy_digest"]
    # By its service, at the latest a while after the run did without it.
    wait_for(lambda: not hung.is_running(), 60)
    left = [*services(pools, "served", "rollout"), *services(pools, "served", "train")]
    check_metrics(pools, left, version=STEPS)
    check_overview(pools, "served")
    processes = [psutil.Process(lease["pid"]) for lease in left]
    engines = [child for process in processes for child in process.children(recursive=True)]
    # A worker that is gone cannot end what it started; the trainer's lives.
    worker = recall(pools.home / "services" / "worker-rollout-gpu.json")
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    cancelled(pools, left)
    wait_for(lambda: not any(each.is_running() for each in [*processes, *engines]), 90)
    for lease in left:
        state = pools.ends(lease["holder"]["flow_run_id"])
        assert state["type"] == "CANCELLED", state
        assert ("Ended by its own process" in (state["message"] or "")) == (lease != left[-1])
    wait_for(lambda: not services(pools, "served", "rollout"), 30)
    pools.run("infra.services", "up", "--profile", "pools")


def test_stages_in_flow_runs_of_their_own_outlive_their_driver_and_make_the_same_bits(
    pools: Pools, local: dict[str, Any], wait_for: Callable[[Callable[[], bool], float], None]
) -> None:
    overrides = [*SMALL, "placement.train=per-step", "placement.reward=per-step"]
    flow_run = pools.start("advance", run="apart", recipe="addition", steps=1, overrides=overrides)
    training = "train of apart 00000001, attempt 1"

    def trains() -> bool:
        runs = {each["name"]: each["state"]["type"] for each in pools.flow_runs("train-stage")}
        return runs.get(training) == "RUNNING"

    wait_for(trains, 240)
    driver = pools.process_of(flow_run)
    assert driver is not None
    os.kill(driver.pid, signal.SIGKILL)
    ended = pools.ends(flow_run, timeout=300)
    assert ended["type"] == "COMPLETED", ended
    ours, theirs = pools.show("apart")["steps"], local["steps"]
    assert [each["policy_digest"] for each in ours] == [
        each["policy_digest"] for each in theirs[:2]
    ]
    stages = ("train-stage", "reward-stage")
    children = [each["name"] for stage in stages for each in pools.flow_runs(stage)]
    ours = [name for name in children if "of apart" in name]
    # The driver that came after it waited for what ran, and asked for nothing that was done.
    assert training in ours
    assert all(name.endswith("attempt 1") for name in ours), ours


def test_neither_the_stores_key_nor_the_token_of_services_comes_to_light(
    pools: Pools, local: dict[str, Any], commands: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last, so that it sees what all the tests before it left."""
    keys = s3_keys(pools.home / "credentials")
    secrets = [keys.secret_key, (pools.home / "service-token").read_text().strip()]
    monkeypatch.setenv("ROLLBOOK_HOME", str(pools.home))
    for name, value in keys.environment().items():
        monkeypatch.setenv(name, value)
    own = {"credentials", "service-token", "seaweedfs/s3.json"}
    # What a child engine's face asks for; a process that was killed leaves it to the next one.
    own |= {str(file.relative_to(pools.home)) for file in pools.home.glob("scratch/*/*/token")}
    assert all((pools.home / name).stat().st_mode & 0o077 == 0 for name in own)
    places = {
        **in_store(open_store(resolve_store(), writing=False)),
        **in_api(pools.api),
        **dict(in_files(pools.home, but=["cache"])),
        "command lines": "\n".join(commands).encode(),
    }
    found = {name for name, content in places.items() for each in secrets if holds(content, each)}
    assert found - own == set()
    assert {"credentials", "service-token"} <= found, "what holds them is seen"
    assert any(name.startswith("logs/served/") for name in places)
    assert any("tasks.train.worker" in line for line in commands)
