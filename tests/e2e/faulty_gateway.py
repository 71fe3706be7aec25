"""An HTTP gateway in front of an S3 server that hangs up on one chosen request, or denies writes.

Every other request and answer passes unchanged, so signatures hold. Knows nothing of runs.
"""

import http.client
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Way = Literal["before", "after"]
Reach = Literal["request", "call", "end"]

NOT_COUNTED = ("/leases/", "/probes/")
"""Liveness, whose number of requests depends on the clock."""
NUM_TRIES = 3
"""How often the S3 backend sends a request before its call fails."""
PASSED_ON_BY_NOBODY = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}
UPSTREAM_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fault:
    """What goes wrong: at the `nth` request (from 1) whose method and path match `call`.

    `before`: it does not arrive; `after`: it takes effect, its answer is lost.
    `reach`: `request`: that one only, so its caller tries again; `call`: its repetitions too, and
    for a conditional put the look at what became of it, so that the store call fails;
    `end`: everything after it.
    """

    call: re.Pattern[str]
    nth: int
    way: Way
    reach: Reach


@dataclass
class Gateway:
    """What passed since the last `arm`, and what is to fail."""

    endpoint: str = ""
    counted: list[str] = field(default_factory=list[str])
    """Method and path of every counted request, in order."""
    struck: list[str] = field(default_factory=list[str])
    """Those that were hung up on."""
    read_only: bool = False
    """Whether what writes is denied, leases too."""
    _fault: Fault | None = None
    _to_come: int = 0
    """Matching requests until the fault strikes; 0 once it has."""
    _left: int = 0
    """Repetitions that still are to fail."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, fault: Fault | None = None) -> None:
        """Begins to count, for `fault` to strike; without one only counts."""
        with self._lock:
            self.counted, self.struck = [], []
            self._fault, self._to_come, self._left = fault, fault.nth if fault else 0, 0

    def disarm(self) -> None:
        """Lets everything pass; what was counted stays to be read."""
        with self._lock:
            self._fault = None

    def verdict(self, request: str, *, conditional: bool) -> Way | None:
        """Counts a request (method and path) and says whether it fails, and how."""
        with self._lock:
            if any(part in request for part in NOT_COUNTED):
                return None
            self.counted.append(request)
            fault = self._fault
            way = self._strike(fault, request, conditional=conditional) if fault else None
            if way:
                self.struck.append(request)
            return way

    def _strike(self, fault: Fault, request: str, *, conditional: bool) -> Way | None:
        if self._to_come:
            self._to_come -= bool(fault.call.fullmatch(request))
            if self._to_come:
                return None
            self._left = NUM_TRIES if conditional else NUM_TRIES - 1
            return fault.way
        if fault.reach == "end":
            return "before"
        if fault.reach == "request" or not self._left or _path(request) != _path(self.struck[0]):
            return None
        self._left -= 1
        return fault.way


def _path(request: str) -> str:
    return urlsplit(request.partition(" ")[2]).path


class Forwarding(BaseHTTPRequestHandler):
    """One connection of a client, with one of its own to the server behind."""

    gateway: Gateway
    upstream: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        host, _, port = self.upstream.partition(":")
        self._server = http.client.HTTPConnection(host, int(port), timeout=UPSTREAM_TIMEOUT_S)

    def finish(self) -> None:
        self._server.close()
        super().finish()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def forward(self) -> None:
        # `Expect: 100-continue` was answered by now, so that the body comes.
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        conditional = self.command == "PUT" and bool(
            {"if-none-match", "if-match"} & {name.lower() for name in self.headers}
        )
        request = f"{self.command} {self.path}"
        if self.gateway.read_only and self.command not in ("GET", "HEAD"):
            return self._deny()
        verdict = self.gateway.verdict(request, conditional=conditional)
        if verdict == "before":
            return self._hang_up()
        try:
            answer, payload = self._ask(body)
        except (OSError, http.client.HTTPException):
            return self._hang_up()
        if verdict == "after":
            return self._hang_up()
        self._pass_on(answer, payload)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = forward

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        self._server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in _passed_on(self.headers.items()):
            self._server.putheader(name, value)
        if body or self.command in ("PUT", "POST"):
            self._server.putheader("Content-Length", str(len(body)))
        self._server.endheaders(body or None)
        answer = self._server.getresponse()
        return answer, answer.read()

    def _pass_on(self, answer: http.client.HTTPResponse, payload: bytes) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in _passed_on(answer.getheaders()):
            self.send_header(name, value)
        # An answer to HEAD names the length of what GET would give.
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        if answer.status not in (204, 304):
            self.send_header("Content-Length", length or str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _deny(self) -> None:
        payload = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response_only(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def _passed_on(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in PASSED_ON_BY_NOBODY]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are no news: engines are killed and connections are cut here."""


@contextmanager
def faulty_gateway(upstream: str) -> Iterator[Gateway]:
    """Runs a gateway to the server at `upstream` (a URL) in a thread of this process."""
    gateway = Gateway()
    handler = type(
        "Bound", (Forwarding,), {"gateway": gateway, "upstream": urlsplit(upstream).netloc}
    )
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    gateway.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield gateway
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
