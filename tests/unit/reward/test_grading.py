"""Parts of a sample are graded where they can be, at once, each within its own limit."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from rewards.contract import RewardInput, Score
from tasks.errors import Permanent, Transient
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.grading import Grading
from tasks.workspace import Workspace

ASKING = "grader_fixtures.asking"
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Service:
    """A real HTTP service whose answer a test decides; counts who asks at once."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: {"values": [float(text) for text in body["texts"]]}
        self.asked: list[dict[str, Any]] = []
        self.busy: set[str] = set()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({"data": [{"id": "small"}]})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                busy = not service.busy.isdisjoint(body["texts"])
                self._reply({} if busy else service.take(body), status=503 if busy else 200)

            def _reply(self, content: dict[str, Any], *, status: int = 200) -> None:
                payload = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None:
                """Stays silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.asked.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.answer(body)
        finally:
            with self._lock:
                self._at_once -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    opened = Service()
    yield opened
    opened.close()


@pytest.fixture
def workspace(importable_fixtures: None, tmp_path: Path) -> Workspace:
    return Workspace(cache=tmp_path / "cache", scratch=tmp_path)


def asking(service: Service, *, name: str = "asked", **options: Any) -> RewardPart:
    part = {"weight": 1.0} | {key: options.pop(key) for key in ("domains",) if key in options}
    return RewardPart.model_validate(
        {"kind": ASKING, "name": name, "options": {"url": service.url, **options}, **part}
    )


def samples(texts: Sequence[str]) -> list[RewardInput]:
    return [
        RewardInput(text, answer="1", sample_id=f"s{index}", domain="d" if index % 2 else "e")
        for index, text in enumerate(texts)
    ]


def test_parts_of_all_kinds_come_back_in_order(service: Service, workspace: Workspace) -> None:
    config = RewardConfig(
        parts=[asking(service), RewardPart(kind="exact", options={"whole": True})], workers=1
    )
    with Grading(config, workspace=workspace) as grading:
        scores = grading.grade(samples(["0.5", "1", "2"]), config=config)
    assert [asked.value for asked, _ in scores] == [0.5, 1.0, 2.0]
    assert [exact.value for _, exact in scores] == [0.0, 1.0, 0.0]


def test_no_part_waits_for_another(service: Service, workspace: Workspace) -> None:
    everyone = threading.Barrier(2)

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        # Each of the two parts is answered only once the other has asked too.
        everyone.wait(60)
        return {"values": [1.0]}

    service.answer = answer
    parts = [asking(service, name=name, about=name) for name in ("one", "other")]
    config = RewardConfig(parts=parts, workers=1)
    with Grading(config, workspace=workspace) as grading:
        (scores,) = grading.grade(samples(["1"]), config=config)
    assert scores == (Score(1.0), Score(1.0))


def test_requests_in_flight_stay_within_their_limit(service: Service, workspace: Workspace) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return {"values": [1.0]}

    service.answer = answer
    config = RewardConfig(parts=[asking(service, concurrency=3)], workers=1)
    with Grading(config, workspace=workspace) as grading:
        grading.grade(samples([str(number) for number in range(30)]), config=config)
    assert len(service.asked) == 30
    assert 1 < service.most_at_once <= 3


def test_a_wrong_number_of_scores_is_an_error_of_every_sample_asked_for(
    service: Service, workspace: Workspace
) -> None:
    config = RewardConfig(parts=[asking(service, together=2)], workers=1)
    service.answer = lambda body: {
        "values": [1.0] if "bad" in body["texts"] else [1.0] * len(body["texts"])
    }
    with Grading(config, workspace=workspace) as grading:
        scores = [score for (score,) in grading.grade(samples(["a", "bad", "c"]), config=config)]
    assert [score.status for score in scores] == ["grader_error", "grader_error", "graded"]
    assert scores[1].reason == (
        "reward 'asked' raised ValueError on sample 's1': 2 samples were asked for, 1 scores came"
    )


def test_no_number_is_an_error_and_never_a_zero(service: Service, workspace: Workspace) -> None:
    service.answer = lambda body: {"values": [float("nan") if body["texts"] == ["bad"] else None]}
    config = RewardConfig(parts=[asking(service)], workers=1)
    with Grading(config, workspace=workspace) as grading:
        scores = [score for (score,) in grading.grade(samples(["bad", "none"]), config=config)]
    assert [score.status for score in scores] == ["grader_error"] * 2
    assert "'s0'" in (scores[0].reason or "")
    assert "finite value" in (scores[1].reason or "")


def test_a_service_that_is_away_leaves_samples_without_a_reward(
    service: Service, workspace: Workspace
) -> None:
    service.close()
    config = RewardConfig(
        parts=[asking(service, patience_s=0.1), RewardPart(kind="format")],
        workers=1,
        max_failed_share=1.0,
    )
    with Grading(config, workspace=workspace) as grading:
        ((asked, form),) = grading.grade(samples(["1"]), config=config)
    assert (asked.value, asked.status) == (None, "grader_error")
    assert service.url in (asked.reason or "")
    assert form.status == "graded"


def test_a_service_that_answers_nobody_is_worth_a_retry(
    service: Service, workspace: Workspace
) -> None:
    service.close()
    config = RewardConfig(parts=[asking(service, patience_s=0.1)], workers=1)
    with (
        Grading(config, workspace=workspace) as grading,
        pytest.raises(Transient, match=r"'asked' graded none of its samples: .*gave no answer"),
    ):
        grading.grade(samples(["1", "2"]), config=config)


def test_below_a_closed_gate_nobody_is_asked(service: Service, workspace: Workspace) -> None:
    gate = RewardPart(kind="format", gate=True, options={"pattern": "[0-9]"})
    config = RewardConfig(parts=[asking(service), gate], workers=1)
    with Grading(config, workspace=workspace) as grading:
        scores = grading.grade(samples(["7", "seven"]), config=config)
    assert [body["texts"] for body in service.asked] == [["7"]]
    assert scores[0] == (Score(7.0), Score(1.0))
    assert scores[1][0] == Score(None, "not_applicable", "gate format is closed")


def test_a_gate_that_asks_is_waited_for_before_others_are_asked(
    service: Service, workspace: Workspace
) -> None:
    service.answer = lambda body: {"values": [float(body["texts"] != ["no"])]}
    gate = asking(service, name="gate", about="gate").model_copy(update={"gate": True})
    config = RewardConfig(parts=[asking(service), gate], workers=1)
    with Grading(config, workspace=workspace) as grading:
        scores = grading.grade(samples(["no", "yes", "no"]), config=config)
    asked = [(body["about"], body["texts"][0]) for body in service.asked]
    assert sorted(asked) == [("gate", "no"), ("gate", "yes"), ("worth", "yes")]
    closed = Score(None, "not_applicable", "gate gate is closed")
    assert scores == [(closed, Score(0.0)), (Score(1.0), Score(1.0)), (closed, Score(0.0))]


def test_one_bad_score_costs_only_its_own_sample(service: Service, workspace: Workspace) -> None:
    service.answer = lambda body: {"values": [None if t == "bad" else 1.0 for t in body["texts"]]}
    config = RewardConfig(parts=[asking(service, together=3)], workers=1)
    with Grading(config, workspace=workspace) as grading:
        scores = [score for (score,) in grading.grade(samples(["a", "bad", "c"]), config=config)]
    assert [score.status for score in scores] == ["graded", "grader_error", "graded"]
    assert "'s1'" in (scores[1].reason or "")


def test_a_service_that_leaves_too_many_without_an_answer_is_worth_a_retry(
    service: Service, workspace: Workspace
) -> None:
    service.busy = {"bad"}
    parts = [asking(service, patience_s=0.1)]
    strict = RewardConfig(parts=parts, workers=1, max_failed_share=0.2)
    lenient = strict.model_copy(update={"max_failed_share": 0.4})
    with Grading(strict, workspace=workspace) as grading:
        scores = grading.grade(samples(["1", "bad", "2"]), config=lenient)
        with pytest.raises(Transient, match=r"graded all but 1 of its samples: .*status 503"):
            grading.grade(samples(["1", "bad", "2"]), config=strict)
    assert [score.status for (score,) in scores] == ["graded", "grader_error", "graded"]


def test_other_domains_are_not_asked(service: Service, workspace: Workspace) -> None:
    config = RewardConfig(
        parts=[asking(service, domains=["d"]), RewardPart(kind="format", domains=["e"])], workers=1
    )
    with Grading(config, workspace=workspace) as grading:
        (first, second) = grading.grade(samples(["1", "2"]), config=config)
    assert [body["texts"] for body in service.asked] == [["2"]]
    assert [score.status for score in first] == ["not_applicable", "graded"]
    assert [score.status for score in second] == ["graded", "not_applicable"]


def test_whoever_watches_hears_of_every_sample(service: Service, workspace: Workspace) -> None:
    told: list[tuple[str, int, int]] = []
    config = RewardConfig(parts=[asking(service), RewardPart(kind="format")], workers=1)
    with Grading(config, workspace=workspace, progress=lambda *said: told.append(said)) as grading:
        grading.grade(samples(["1", "2", "3"]), config=config, about="step 4")
    assert told[-1] == ("step 4", 3, 3)
    assert {total for _, _, total in told} == {3}


def test_progress_only_ever_grows(service: Service, workspace: Workspace) -> None:
    told: list[int] = []
    gate = RewardPart(kind="format", gate=True, options={"pattern": "[0-9]"})
    config = RewardConfig(parts=[gate, asking(service), asking(service, name="b")], workers=1)
    watch = lambda about, done, total: told.append(done)  # noqa: E731
    with Grading(config, workspace=workspace, progress=watch) as grading:
        grading.grade(samples(["1", "two", "3", "4"]), config=config)
    assert told == sorted(told)
    assert (told[0], told[-1], told.count(4)) == (0, 4, 1)


def test_a_record_says_which_model_graded(service: Service, workspace: Workspace) -> None:
    config = RewardConfig(parts=[asking(service)], workers=1)
    with Grading(config, workspace=workspace) as grading:
        described = grading.describe(config)
    assert described == {"reward_model:small": f"{service.url} small"}


def test_sandboxes_whose_holder_died_are_opened_again(workspace: Workspace) -> None:
    part = RewardPart(kind="code", options={"whole": True})
    config = RewardConfig(parts=[part], workers=1)
    item = RewardInput("print(6 * 7)", extra={"tests": [{"stdin": "", "stdout": "42"}]})
    with Grading(config, workspace=workspace) as grading:
        ((before,),) = grading.grade([item], config=config)
        holders = [
            child
            for child in psutil.Process().children()
            if child.name() == "bwrap" and "--as-pid-1" in child.cmdline()
        ]
        for holder in holders:
            holder.kill()
            holder.wait()
        ((after,),) = grading.grade([item], config=config)
    assert len(holders) == 1
    assert (before, after) == (Score(1.0), Score(1.0))


def test_closing_ends_every_wait(service: Service, workspace: Workspace) -> None:
    begun, ended = threading.Event(), threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        ended.wait(120)
        return {"values": [1.0]}

    service.answer = answer
    config = RewardConfig(parts=[asking(service)], workers=1, max_failed_share=1.0)
    grading = Grading(config, workspace=workspace)
    graded: list[Any] = []
    waiting = threading.Thread(
        target=lambda: graded.extend(grading.grade(samples(["1"]), config=config))
    )
    waiting.start()
    assert begun.wait(60)
    grading.close()
    waiting.join(60)
    ended.set()
    assert not waiting.is_alive()
    assert graded[0][0].status == "grader_error"


def test_what_waits_for_its_turn_when_all_is_closed_ends_with_the_cause(
    service: Service, workspace: Workspace
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        ended.wait(120)
        return {"values": [1.0]}

    service.answer = answer
    config = RewardConfig(parts=[asking(service, concurrency=1)], workers=1)
    grading = Grading(config, workspace=workspace)
    with ThreadPoolExecutor(1) as caller:
        graded = caller.submit(grading.grade, samples(["1", "2", "3"]), config=config)
        assert begun.wait(60)
        grading.close()
        ended.set()
        with pytest.raises(Permanent, match="closed while samples were graded"):
            graded.result(60)
    with pytest.raises(Permanent, match="closed while samples were graded"):
        grading.grade(samples(["1"]), config=config)
