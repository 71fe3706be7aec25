"""A real HTTP service on this machine that answers as a test tells it to."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "judge-7b"


@dataclass(frozen=True)
class Asked:
    """One request that came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    """What is sent back; `wait` is waited for first."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None


class Service:
    """Answers POST with the scripted replies in order, then with what `otherwise` makes of it."""

    def __init__(self, port: int = 0) -> None:
        self.asked: list[Asked] = []
        self.script: list[Reply] = []
        self.otherwise: Callable[[Asked], Reply] = lambda asked: Reply({"echo": asked.body})
        self._lock = threading.Lock()
        service = self

        class Handle(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(service.take(self._asked(None)))

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                self._send(service.take(self._asked(json.loads(raw))))

            def _asked(self, body: Any) -> Asked:
                return Asked(self.command, self.path, dict(self.headers), body)

            def _send(self, reply: Reply) -> None:
                if reply.wait is not None:
                    reply.wait.wait(60)
                raw = reply.body if isinstance(reply.body, bytes) else _json(reply.body)
                try:
                    self.send_response(reply.status)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)
                except OSError:  # The client gave up waiting.
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handle)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # The default notices a shutdown after half a second.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def take(self, asked: Asked) -> Reply:
        """Notes a request and returns its reply."""
        with self._lock:
            self.asked.append(asked)
            if asked.method == "GET":
                return Reply({"data": [{"id": MODEL}, {"id": "another"}]})
            return self.script.pop(0) if self.script else self.otherwise(asked)

    @property
    def posted(self) -> list[Asked]:
        """The POST requests so far."""
        return [asked for asked in self.asked if asked.method == "POST"]

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def running(port: int = 0) -> Iterator[Service]:
    """Yields a service and ends it."""
    service = Service(port)
    try:
        yield service
    finally:
        service.close()


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()
