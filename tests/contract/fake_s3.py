"""A tiny real HTTP server that speaks as much S3 as the store needs, and misbehaves on demand."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class FakeS3:
    """Its objects, what it was asked, and how it misbehaves."""

    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    honours: frozenset[str] = frozenset({"if-none-match", "if-match"})
    misbehave: Callable[["Answering"], bool] = lambda answering: False
    """Called for each request; True means that it answered (or did not) in its own way."""
    endpoint: str = ""


class Answering(BaseHTTPRequestHandler):
    """One request."""

    fake: FakeS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path.lstrip("/"))

    def handle_any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.fake.requests.append((self.command, self.path, headers))
        if not self.fake.misbehave(self):
            getattr(self, f"serve_{self.command.lower()}")()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode())

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def apply(self) -> str:
        """Stores the body; returns its etag."""
        self.fake.objects[self.key] = self.body
        return etag_of(self.body)

    def serve_put(self) -> None:
        stored = self.fake.objects.get(self.key)
        absent, match = self.headers.get("if-none-match"), self.headers.get("if-match")
        if absent and "if-none-match" in self.fake.honours and stored is not None:
            return self.fail(412, "PreconditionFailed")
        if match and "if-match" in self.fake.honours:
            if stored is None:
                return self.fail(404, "NoSuchKey")
            if etag_of(stored) != match:
                return self.fail(412, "PreconditionFailed")
        self.answer(200, ETag=self.apply())

    def serve_get(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "list-type" in query:
            return self.answer(200, self.listing(query.get("prefix", [""])[0]))
        if "uploads" in query:
            return self.answer(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
        stored = self.fake.objects.get(self.key)
        if stored is None:
            return self.fail(404, "NoSuchKey")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if wanted:
            part = stored[int(wanted[1]) : int(wanted[2]) + 1]
            return self.answer(206, part, ETag=etag_of(stored))
        self.answer(200, stored, ETag=etag_of(stored))

    def serve_head(self) -> None:
        stored = self.fake.objects.get(self.key)
        if stored is None:
            return self.answer(404)
        self.answer(200, stored, ETag=etag_of(stored))

    def serve_delete(self) -> None:
        self.fake.objects.pop(self.key, None)
        self.answer(204)

    def listing(self, prefix: str) -> bytes:
        keys = sorted(key.partition("/")[2] for key in self.fake.objects)
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>1</Size></Contents>"
            for key in keys
            if key.startswith(prefix)
        )
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
        )


def etag_of(payload: bytes) -> str:
    return f'"{hashlib.md5(payload).hexdigest()}"'


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """Runs a fake server in a thread."""
    fake = FakeS3()
    handler = type("Bound", (Answering,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    fake.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
