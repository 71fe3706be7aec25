"""What a service refuses that strangers can reach."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from tasks.child_process import Face
from tasks.client import Child, ChildSpec, Service
from tasks.errors import Permanent, Transient
from tasks.service_contract import MAX_REQUEST_BYTES
from tasks.workspace import Workspace
from tests.unit.service.echo_stage import EchoRequest, EchoResult

TOKEN = "a-token-that-services-share"
RUN = "some-run"


@pytest.fixture
def open_child(echo_spec: Callable[..., ChildSpec], workspace: Workspace) -> Iterator[Child]:
    face = Face(run=RUN, token=TOKEN, drain_s=10.0)
    with Child(replace(echo_spec(), face=face), workspace=workspace) as child:
        child.wait_ready()
        yield child


def post(child: Child, body: bytes, token: str = TOKEN) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{child.url}/run", content=body, headers=headers, timeout=20.0)


def test_a_wrong_token_is_refused(open_child: Child) -> None:
    assert post(open_child, b"{}", token="guessed").status_code == 401
    assert httpx.get(f"{open_child.url}/health").status_code == 401


def test_a_malformed_request_is_refused(open_child: Child) -> None:
    answer = post(open_child, b'{"type": ')
    assert answer.status_code == 422
    assert "does not parse" in answer.text


def test_a_request_that_is_too_large_is_refused_unread(open_child: Child) -> None:
    answer = post(open_child, b" " * (MAX_REQUEST_BYTES + 1))
    assert answer.status_code == 413


def test_a_request_that_the_store_does_not_bear_out_is_refused(open_child: Child) -> None:
    assert open_child.run(EchoRequest(text=RUN), EchoResult).text == RUN
    with pytest.raises(Permanent, match=f"this is for {RUN}"):
        open_child.run(EchoRequest(text="another-run"), EchoResult)
    assert open_child.health(within_s=5.0).num_calls == 1


def test_an_answer_begins_before_the_call_ends(open_child: Child) -> None:
    body = json.dumps({"type": "EchoRequest", "request": {"seconds": 3.0}})
    headers = {"Authorization": f"Bearer {TOKEN}"}
    began, at = time.monotonic(), list[float]()
    with httpx.stream("POST", f"{open_child.url}/run", content=body, headers=headers) as answer:
        at += [time.monotonic() - began for _ in answer.iter_raw()]
    assert at[0] < 1.0
    assert at[-1] > 2.5


def test_a_call_in_flight_is_answered_when_the_service_is_told_to_end(open_child: Child) -> None:
    results: list[EchoResult] = []
    assert open_child.url is not None
    pid = open_child.pid
    assert pid is not None
    service = Service(open_child.url, TOKEN)

    def call() -> None:
        results.append(service.run(EchoRequest(text=RUN, seconds=2.0), EchoResult))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.7)
    os.kill(pid, signal.SIGTERM)
    thread.join(20)
    service.close()
    assert [result.text for result in results] == [RUN]


@pytest.mark.parametrize(("status", "kind"), [(500, Transient), (503, Transient), (403, Permanent)])
def test_a_server_that_fails_may_be_asked_again_and_one_that_refuses_may_not(
    status: int, kind: type[Exception]
) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:  # type: ignore[override]
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        service = Service(f"http://127.0.0.1:{server.server_address[1]}", TOKEN)
        with pytest.raises(kind, match=str(status)):
            service.health()
        service.close()
