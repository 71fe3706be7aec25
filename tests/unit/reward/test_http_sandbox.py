"""A small real service that runs programs in bubblewrap stands in for a cluster's."""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rewards import code
from rewards.contract import Program, ProgramResult, RewardInput, SandboxLimits, Score
from tasks.reward.bubblewrap import BubblewrapSandbox
from tasks.reward.contract import SandboxConfig
from tasks.reward.http_sandbox import HttpSandbox
from tasks.reward.sandbox import open_sandbox

PYTHON = ("python", "-S", "main.py")


class Service:
    """`POST /run_code`; `refuse` is asked before each program and may name an HTTP status."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[dict[str, Any], str | None]] = []
        self.refuse: Callable[[], int | None] = lambda: None
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = self._run
        self._sandbox = BubblewrapSandbox(slots=4)
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append((body, self.headers["Authorization"]))
                status = service.refuse() if self.path == "/run_code" else 404
                answer = json.dumps({} if status else service.answer(body)).encode()
                self.send_response(status or 200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._sandbox.close()

    def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        files = {name: base64.b64decode(text).decode() for name, text in body["files"].items()}
        result = self._sandbox.run(
            Program({**files, "service.py": body["code"]}, ("python", "service.py"), body["stdin"]),
            limits=SandboxLimits(cpu_s=body["run_timeout"], asleep_s=body["run_timeout"]),
        )
        timed_out = result.killed_by in ("cpu", "asleep", "wall")
        ended = {
            "status": "TimeLimitExceeded" if timed_out else "Finished",
            "return_code": result.exit_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
            "execution_time": 0.1,
        }
        status = "Success" if result.exit_code == 0 else "Failed"
        return {"status": status, "message": "", "run_result": ended, "files": {}}


@pytest.fixture
def service() -> Iterator[Service]:
    started = Service()
    yield started
    started.close()


def client(url: str, **settings: Any) -> HttpSandbox:
    return HttpSandbox(SandboxConfig(backend="http", url=url, **{"patience_s": 20.0, **settings}))


@pytest.fixture
def sandbox(service: Service) -> Iterator[HttpSandbox]:
    opened = client(service.url)
    yield opened
    opened.close()


def item(source: str, tests: object) -> RewardInput:
    return RewardInput(f"```python\n{source}\n```", extra={"tests": tests})


def test_a_program_with_files_and_input_runs_there(sandbox: HttpSandbox) -> None:
    files = {"main.py": "from a.b import c; print(c, input())", "a/b.py": "c = 'é'"}
    result = sandbox.run(Program(files, PYTHON, "x\n"), limits=SandboxLimits())
    assert result == ProgramResult(0, "é x\n", "")


def test_the_service_is_told_what_its_api_names(service: Service, sandbox: HttpSandbox) -> None:
    limits = SandboxLimits(cpu_s=2, asleep_s=3, memory_bytes=512 << 20)
    sandbox.run(Program({"main.py": "print(1)"}, PYTHON, "in"), limits=limits)
    [(body, authorization)] = service.requests
    assert (body["language"], body["stdin"]) == ("python", "in")
    assert (body["run_timeout"], body["memory_limit_MB"]) == (5, 512)
    assert base64.b64decode(body["files"]["main.py"]) == b"print(1)"
    assert authorization is None


def test_the_bearer_token_comes_from_the_environment(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="SANDBOX_TOKEN"):
        client(service.url, api_key_env="SANDBOX_TOKEN")
    monkeypatch.setenv("SANDBOX_TOKEN", "secret")
    opened = client(service.url, api_key_env="SANDBOX_TOKEN")
    opened.run(Program({"main.py": ""}, PYTHON), limits=SandboxLimits())
    opened.close()
    assert service.requests[0][1] == "Bearer secret"


@pytest.mark.parametrize(
    ("source", "exit_code", "killed_by"),
    [
        ("import sys; sys.exit(3)", 3, None),
        ("while True: pass", None, "cpu"),
        ("print('x' * 3000)", None, "output"),
        ("import os; os.abort()", None, "signal"),
    ],
)
def test_how_a_program_ends_comes_back(
    sandbox: HttpSandbox, source: str, exit_code: int | None, killed_by: str | None
) -> None:
    limits = SandboxLimits(cpu_s=0.5, asleep_s=0.5, output_bytes=1000)
    result = sandbox.run(Program({"main.py": source}, PYTHON), limits=limits)
    assert (result.exit_code, result.killed_by) == (exit_code, killed_by)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_service_is_asked_again(service: Service, sandbox: HttpSandbox, status: int) -> None:
    answers = [status, status]
    service.refuse = lambda: answers.pop() if answers else None
    result = sandbox.run(Program({"main.py": "print(1)"}, PYTHON), limits=SandboxLimits())
    assert result.stdout == "1\n"
    assert len(service.requests) == 3


def test_a_service_that_refuses_is_not_asked_again(service: Service, sandbox: HttpSandbox) -> None:
    service.refuse = lambda: 401
    with pytest.raises(OSError, match="run_code refused the request: status 401"):
        sandbox.run(Program({}, PYTHON), limits=SandboxLimits())
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "SandboxError", "message": "no pod left", "run_result": None},
        {"status": "Success", "run_result": {"status": "Error", "stdout": ""}},
        {"status": "fine"},
        {},
    ],
)
def test_a_fault_of_the_service_is_never_a_result(service: Service, answer: dict) -> None:
    service.answer = lambda _: answer
    opened = client(service.url, patience_s=0.5)
    with pytest.raises(OSError, match=f"{service.url}/run_code"):
        opened.run(Program({}, PYTHON), limits=SandboxLimits())
    opened.close()


def test_a_batch_outlasts_a_service_that_is_away_for_a_while() -> None:
    service = Service()
    service.close()
    opened = client(service.url, patience_s=60.0, concurrency=8)
    items = [
        item(f"print({n} + int(input()))", [{"stdin": "1", "stdout": str(n + 1)}]) for n in range(8)
    ]
    with ThreadPoolExecutor(8) as threads:
        scores = [threads.submit(code.score, each, code.Config(), opened) for each in items]
        time.sleep(1.0)
        assert not any(each.done() for each in scores)
        again = Service(service.port)
        assert [each.result() for each in scores] == [Score(1.0)] * 8
    again.close()
    opened.close()


def test_a_service_that_stays_away_is_an_error_that_names_it() -> None:
    opened = client("http://127.0.0.1:9", patience_s=0.5)
    with pytest.raises(OSError, match=r"http://127.0.0.1:9/run_code gave no answer: ConnectError"):
        code.score(item("print(1)", [{"stdin": "", "stdout": "1"}]), code.Config(), opened)
    opened.close()


def test_asserts_of_calls_and_expressions_are_judged_here(sandbox: HttpSandbox) -> None:
    source = "def f(n): return [n, n]"
    tests = ["assert f(2) == [2, 2]", "assert sorted(f(3))[0] == 3"]
    assert code.score(item(source, tests), code.Config(), sandbox) == Score(1.0)
    wrong = code.score(item(source, [*tests, "assert f(2) == (2, 2)"]), code.Config(), sandbox)
    assert wrong == Score(0.0, reason="wrong_output (test 3 of 3)")


@pytest.mark.parametrize("test", ["assert f(1) > 0", "assert (f(1) > 0) == True"])
def test_tests_that_must_question_the_program_name_the_backend(
    sandbox: HttpSandbox, test: str
) -> None:
    score = code.score(item("def f(n): return n", [test]), code.Config(), sandbox)
    assert (score.value, score.status) == (None, "grader_error")
    assert "backend=bubblewrap" in (score.reason or "")


def test_the_door_opens_a_service_without_asking_it(tmp_path: Path) -> None:
    config = SandboxConfig(backend="http", url="http://127.0.0.1:9", patience_s=0)
    opened = open_sandbox(config, scratch=tmp_path)
    assert not opened.joins
    opened.close()


def test_closing_ends_a_wait_for_a_program(service: Service) -> None:
    begun, over = threading.Event(), threading.Event()

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        over.wait(120)
        return {}

    service.answer = answer
    opened = client(service.url)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(
            opened.run, Program({"main.py": ""}, PYTHON), limits=SandboxLimits()
        )
        assert begun.wait(60)
        opened.close()
        error = waiting.exception(timeout=60)
        over.set()
    assert "closed" in str(error)
