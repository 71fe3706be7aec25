"""What `serve_model` starts in unit tests: a small server with vLLM's faces and its ways to fail.

Used as the interpreter: it is called as `python -m vllm... --port N --served-model-name NAME ...`.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def option(name: str) -> str | None:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


class Handle(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == f"Bearer {os.environ['VLLM_API_KEY']}"
        models = {"data": [{"id": option("--served-model-name")}]} if known else {}
        answers = {"/v1/models": models, "/version": {"version": "0.0"}, "/health": {}}
        self._send(answers[self.path])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send({"pid": os.getpid()})

    def _send(self, body: dict) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if "--break" in sys.argv:
        print("ValueError: no such architecture", file=sys.stderr)
        print("nanobind: leaked 9 types!\n - leaked type x\n" * 20, file=sys.stderr)
        sys.exit(3)
    taken = option("--taken-once")
    if taken and not Path(taken).exists():
        Path(taken).touch()
        print("OSError: [Errno 98] Address already in use", file=sys.stderr)
        sys.exit(1)
    # As vLLM's resource tracker does, which gives shared memory back a moment after the end.
    last_words = f"sleep 0.2; touch {option('--last-words')}" if "--last-words" in sys.argv else ""
    subprocess.Popen(["sh", "-c", f"cat; {last_words}"], stdin=subprocess.PIPE)
    pids = option("--pids")
    if pids:
        grandchild = subprocess.Popen(["sleep", "600"])
        Path(pids).write_text(json.dumps([os.getpid(), grandchild.pid, os.getppid()]))
    if "--hang" in sys.argv:
        time.sleep(600)
    HTTPServer(("127.0.0.1", int(option("--port") or 0)), Handle).serve_forever()


main()
