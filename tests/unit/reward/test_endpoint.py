"""Services that are slow, busy, away or wrong, over a real connection."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from rewards.contract import EndpointConfig, Refused
from tasks.reward.answers import Answers
from tasks.reward.endpoint import HttpEndpoint, open_endpoint
from tasks.workspace import Workspace
from tests.unit.reward.answering_service import MODEL, Asked, Reply, Service, running

SECRET = "sk-very-secret-token"
PATH = "/v1/chat/completions"

Open = Callable[..., HttpEndpoint]


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as made:
        yield made


@pytest.fixture
def opened(service: Service, tmp_path: Path) -> Iterator[Open]:
    made: list[HttpEndpoint] = []

    def open_one(**settings: Any) -> HttpEndpoint:
        cache = settings.pop("cache", None)
        config = EndpointConfig(**({"url": service.url, "patience_s": 30.0} | settings))
        made.append(HttpEndpoint(config, url=config.url or "", cache=cache))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


def everything(answer: Any) -> Any:
    return answer


def ask(endpoint: HttpEndpoint, question: Any = 1) -> Any:
    return endpoint.post(PATH, {"question": question}, read=everything)


def test_the_answer_is_read_and_the_model_is_named(service: Service, opened: Open) -> None:
    service.script = [Reply({"value": 7})]
    endpoint = opened()
    assert endpoint.post(PATH, {"question": 1}, read=lambda answer: answer["value"]) == 7
    assert service.posted[0].path == PATH
    assert service.posted[0].body == {"model": MODEL, "question": 1}


def test_the_first_listed_model_is_looked_up_once(service: Service, opened: Open) -> None:
    endpoint = opened()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ask(endpoint, number), range(16)))
    assert len([asked for asked in service.asked if asked.path == "/v1/models"]) == 1
    assert {asked.body["model"] for asked in service.posted} == {MODEL}


def test_a_named_model_is_not_looked_up(service: Service, opened: Open) -> None:
    ask(opened(model="mine"))
    assert [asked.body["model"] for asked in service.asked] == ["mine"]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_status_that_may_pass_is_tried_again(status: int, service: Service, opened: Open) -> None:
    service.script = [Reply({}, status), Reply({"value": 1})]
    assert ask(opened(model="m")) == {"value": 1}
    assert len(service.posted) == 2


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_waited_for(form: str, service: Service, opened: Open) -> None:
    later = datetime.now(UTC) + timedelta(seconds=3)
    wish = "1.5" if form == "seconds" else format_datetime(later, usegmt=True)
    service.script = [Reply({}, 429, {"Retry-After": wish})]
    begun = time.monotonic()
    ask(opened(model="m"))
    # A date has whole seconds, so that 3 s may be 2 by now; without the header it takes 0.25.
    assert time.monotonic() - begun > 1.4


@pytest.mark.parametrize("wish", ["soon", "-5", "Thu, 01 Jan 1970 00:00:00 GMT", "nan"])
def test_a_retry_after_that_says_nothing_is_ignored(
    wish: str, service: Service, opened: Open
) -> None:
    service.script = [Reply({}, 503, {"Retry-After": wish})]
    ask(opened(model="m"))
    assert len(service.posted) == 2


def test_a_wait_beyond_patience_is_not_begun(service: Service, opened: Open) -> None:
    service.script = [Reply({}, 429, {"Retry-After": "3600"})]
    with pytest.raises(OSError, match=r"status 429.*Tried 1 times .*patience_s = 30"):
        ask(opened(model="m"))


def test_an_answer_that_is_not_json_is_asked_for_again(service: Service, opened: Open) -> None:
    service.script = [Reply(b"<html>starting</html>"), Reply(b"[" * 100_000), Reply({"value": 1})]
    assert ask(opened(model="m")) == {"value": 1}


def test_a_silent_service_times_out_and_is_asked_again(service: Service, opened: Open) -> None:
    hold = threading.Event()
    service.script = [Reply({}, wait=hold), Reply({"value": 1})]
    try:
        assert ask(opened(model="m", request_timeout_s=1.0)) == {"value": 1}
    finally:
        hold.set()


def test_a_service_that_comes_back_in_time_has_lost_nothing(opened: Open) -> None:
    with running() as gone:
        port = gone.port
    endpoint = opened(url=gone.url, model="m")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, endpoint)
        time.sleep(0.6)
        assert not answer.done()
        with running(port):
            assert answer.result(30) == {"echo": {"model": "m", "question": 1}}


def test_a_service_that_stays_away_is_named(opened: Open) -> None:
    with running() as gone:
        pass
    with pytest.raises(OSError, match=rf"{gone.url}{PATH} gave no answer: ConnectError"):
        ask(opened(url=gone.url, model="m", patience_s=0.0))


def test_patience_is_spent_once_and_not_for_every_request(service: Service, opened: Open) -> None:
    service.otherwise = lambda _: Reply({}, 503)
    endpoint = opened(model="m", patience_s=1.0)
    for question in range(5):
        with pytest.raises(OSError, match="status 503"):
            ask(endpoint, question)
    tries = [asked.body["question"] for asked in service.posted]
    assert tries.count(0) > 1
    assert [tries.count(question) for question in range(1, 5)] == [1] * 4
    service.otherwise = lambda _: Reply({"value": 1})
    ask(endpoint, 8)
    service.script = [Reply({}, 503)]
    assert ask(endpoint, 9) == {"value": 1}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Refused),
        (413, Refused),
        (422, Refused),
        (403, PermissionError),
        (404, OSError),
        (302, OSError),
    ],
)
def test_a_refusal_is_final_and_quoted(
    status: int, kind: type[OSError], service: Service, opened: Open
) -> None:
    service.script = [Reply({"error": "the input\nis too long"}, status)]
    with pytest.raises(
        OSError, match=rf"{PATH} refused the request: status {status}: .*too long"
    ) as said:
        ask(opened(model="m"))
    assert type(said.value) is kind
    assert len(service.posted) == 1


def test_the_key_is_sent_and_a_wrong_one_fails_at_once_without_being_shown(
    service: Service, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guarded(asked: Asked) -> Reply:
        given = asked.headers.get("Authorization", "")
        if given == f"Bearer {SECRET}":
            return Reply({"value": 1})
        return Reply({"error": f"I do not know {given}"}, 401)

    service.otherwise = guarded
    monkeypatch.setenv("JUDGE_KEY", f"{SECRET}\n")
    endpoint = opened(model="m", api_key_env="JUDGE_KEY")
    assert ask(endpoint) == {"value": 1}
    monkeypatch.setenv("JUDGE_KEY", "another-secret")
    with pytest.raises(OSError, match="status 401") as said:
        ask(opened(model="m", api_key_env="JUDGE_KEY"))
    assert "another-secret" not in str(said.value)
    assert service.url in str(said.value)
    assert len(service.posted) == 2
    assert SECRET not in repr(endpoint.describe())


@pytest.mark.parametrize("value", [None, "", "  ", "a\nb", "schlüssel"])
def test_a_missing_or_broken_key_is_named_by_its_variable(
    value: str | None, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(ValueError, match="JUDGE_KEY"):
        opened(api_key_env="JUDGE_KEY")


def test_requests_of_all_threads_share_one_rate(service: Service, opened: Open) -> None:
    endpoint = opened(model="m", requests_per_minute=600)
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ask(endpoint, number), range(8)))
    # 600 a minute is one in 0.1 s; the first goes at once.
    assert time.monotonic() - begun > 0.69


def test_no_more_requests_are_under_way_than_allowed(service: Service, opened: Open) -> None:
    lock, under_way, most = threading.Lock(), [0], [0]

    def counted(asked: Asked) -> Reply:
        return Reply({"value": 1}, wait=Counting())

    class Counting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            with lock:
                under_way[0] += 1
                most[0] = max(most[0], under_way[0])
            time.sleep(0.05)
            with lock:
                under_way[0] -= 1
            return True

    service.otherwise = counted
    endpoint = opened(model="m", concurrency=3)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: ask(endpoint, number), range(12)))
    assert most[0] <= 3


def test_equal_requests_of_several_threads_are_sent_once(service: Service, opened: Open) -> None:
    endpoint = opened(model="m")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(endpoint), range(8)))
    assert len(service.posted) == 1
    assert all(answer == answers[0] for answer in answers)


def test_an_answer_is_kept_for_later_runs(service: Service, opened: Open, tmp_path: Path) -> None:
    first = ask(opened(cache=tmp_path))
    again = ask(opened(cache=tmp_path))
    assert again == first
    assert len(service.posted) == 1


def test_another_body_path_model_or_address_is_another_question(
    service: Service, opened: Open, tmp_path: Path
) -> None:
    ask(opened(cache=tmp_path, model="m"), 1)
    ask(opened(cache=tmp_path, model="m"), 2)
    ask(opened(cache=tmp_path, model="n"), 1)
    opened(cache=tmp_path, model="m").post("/other", {"question": 1}, read=everything)
    assert len(service.posted) == 4
    with running() as other:
        ask(opened(cache=tmp_path, model="m", url=other.url), 1)
        assert len(other.posted) == 1


def test_an_answer_that_the_grader_refuses_is_not_kept(
    service: Service, opened: Open, tmp_path: Path
) -> None:
    def strict(answer: Any) -> int:
        if answer["value"] is None:
            raise ValueError("no value")
        return answer["value"]

    service.script = [Reply({"value": None}), Reply({"value": 4})]
    endpoint = opened(cache=tmp_path, model="m")
    with pytest.raises(ValueError, match="no value"):
        endpoint.post(PATH, {"question": 1}, read=strict)
    assert endpoint.post(PATH, {"question": 1}, read=strict) == 4
    assert opened(cache=tmp_path, model="m").post(PATH, {"question": 1}, read=strict) == 4
    assert len(service.posted) == 2


def test_a_kept_answer_that_another_grader_cannot_read_is_asked_for_again(
    service: Service, opened: Open, tmp_path: Path
) -> None:
    def newer(answer: Any) -> int:
        if "value" not in answer:
            raise ValueError("an old answer")
        return answer["value"]

    service.script = [Reply({"old": 1}), Reply({"value": 2})]
    ask(opened(cache=tmp_path, model="m"))
    assert opened(cache=tmp_path, model="m").post(PATH, {"question": 1}, read=newer) == 2


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\x00", None])
def test_a_broken_file_of_the_cache_is_asked_for_again(
    damage: bytes | None, service: Service, opened: Open, tmp_path: Path
) -> None:
    first = ask(opened(cache=tmp_path, model="m"))
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    whole = file.read_bytes()
    # None: one byte is another, and the file is still JSON.
    file.write_bytes(whole.replace(b"question", b"quest1on") if damage is None else damage)
    assert ask(opened(cache=tmp_path, model="m")) == first
    assert len(service.posted) == 2
    assert file.read_bytes() == whole


def test_the_cache_holds_no_token_and_no_question(
    service: Service, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    service.script = [Reply({"value": 1})]
    ask(opened(cache=tmp_path, model="m", api_key_env="JUDGE_KEY"), "what the policy wrote")
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"value" in kept
    assert SECRET.encode() not in kept
    assert b"policy" not in kept


def test_the_cache_keeps_the_newest_within_its_bound(tmp_path: Path) -> None:
    answers = Answers(tmp_path, max_files=10)
    for number in range(25):
        answers.put(f"{number:064x}", number)
    kept = {int(path.name, 16) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(kept) <= 15
    assert {20, 21, 22, 23, 24} <= kept
    Answers(tmp_path, max_files=3)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 3


def test_a_cache_that_cannot_be_written_costs_no_answer(
    service: Service, opened: Open, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way of the directory")
    endpoint = opened(cache=file, model="m")
    assert ask(endpoint) == ask(endpoint)
    assert len(service.posted) == 1


def test_close_ends_waiting_requests(service: Service, opened: Open) -> None:
    service.otherwise = lambda _: Reply({}, 503, {"Retry-After": "20"})
    endpoint = opened(model="m")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, endpoint)
        while not service.posted:
            time.sleep(0.01)
        endpoint.close()
        with pytest.raises(OSError, match="closed"):
            waiting.result(15)


def test_any_text_can_be_sent(service: Service, opened: Open) -> None:
    texts = ["\ud800 alone", "\x00", "a" * 2_000_000, "häß 𝔘 \u202e"]
    endpoint = opened(model="m")
    assert [ask(endpoint, text)["echo"]["question"] for text in texts] == texts


def test_what_answers_depend_on_is_described(service: Service, opened: Open) -> None:
    assert opened().describe() == {f"reward_model:{MODEL}": f"{service.url} {MODEL}"}
    with running() as gone:
        pass
    away = opened(url=gone.url, patience_s=0.0)
    assert away.describe() == {f"reward_model:{gone.url}": gone.url}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "one of the two"),
        ({"url": "http://h", "path": "/m"}, "one of the two"),
        ({"url": "h:8000"}, "is not the address"),
        ({"url": "ftp://h"}, "is not the address"),
        ({"url": "http://h/v1/"}, "without `/v1`"),
        ({"url": "http://h?key=1"}, "without a query"),
        ({"url": "http://me:pass@h"}, "api_key_env"),
        ({"path": "/m", "api_key_env": "K"}, "its own key"),
        ({"url": "http://h", "arguments": ["--dtype", "half"]}, "belong to `path`"),
    ],
)
def test_settings_that_name_no_one_service_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        EndpointConfig(**settings)
    assert "pass@" not in str(error.value)


def test_a_directory_without_a_model_or_interpreter_is_refused(tmp_path: Path) -> None:
    workspace = Workspace(cache=tmp_path / "cache", scratch=tmp_path)
    config = EndpointConfig(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        open_endpoint(config, serves="classify", python="python", workspace=workspace)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"set reward\.python"):
        open_endpoint(config, serves="classify", python=None, workspace=workspace)
