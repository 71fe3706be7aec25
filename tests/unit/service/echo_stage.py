"""A real stage and engine, small enough to watch: it echoes, sleeps, fails and dies on request."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from storage.errors import Corrupt, Unavailable
from storage.records import Record
from tasks.errors import Permanent
from tasks.workspace import Workspace


class EchoRequest(Record):
    """What to do, and a text to give back."""

    do: str = "echo"
    text: str = ""
    seconds: float = 0.0


class EchoResult(Record):
    """The text, who served it, and how many calls the engine has had."""

    text: str
    pid: int
    rank_pid: int
    calls: int


REQUESTS = {EchoRequest: EchoResult}
PACKAGES = ("pydantic",)


class EchoEngine:
    """Holds one process of its own, as an engine with ranks does."""

    def __init__(self, rank: "subprocess.Popen[bytes]", closed_file: Path) -> None:
        self.rank = rank
        self.calls = 0
        self._closed_file = closed_file
        self.steps = 0

    def close(self) -> None:
        """Leaves a mark that it was asked to close; the rank is left to the group's end."""
        self._closed_file.write_text("closed")

    def progress(self) -> int:
        """Grows while an echo works."""
        return self.steps

    def serves(self) -> tuple[int, str] | None:
        """No policy."""
        return None


def start(config: dict[str, Any], *, model_dir: Path, workspace: Workspace) -> EchoEngine:
    """Starts a rank that ignores SIGTERM, after `start_s` seconds; `fail` refuses."""
    time.sleep(config.get("start_s", 0))
    if "fail" in config:
        print("vendor says: the device is on fire", file=sys.stderr)
        raise ValueError(config["fail"])
    if config.get("exit"):
        print("vendor says: good bye", file=sys.stderr, flush=True)
        os._exit(3)
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", ignore])
    Path(config["pid_file"]).write_text(f"{os.getpid()} {rank.pid}")
    return EchoEngine(rank, Path(config["closed_file"]))


def admit(request: EchoRequest, store: object, *, run: str) -> None:
    """Takes whatever speaks of the run."""
    if request.text and request.text != run:
        raise Permanent(f"this is for {run}")


def run(
    request: EchoRequest, store: object, engine: EchoEngine, *, workspace: Workspace
) -> EchoResult:
    """Does what the request says."""
    engine.calls += 1
    ends = time.monotonic() + request.seconds
    while time.monotonic() < ends:
        time.sleep(min(0.2, ends - time.monotonic()))
        engine.steps += request.do != "hang"
    if request.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if request.do == "unavailable":
        raise Unavailable("the store is out of reach")
    if request.do == "corrupt":
        raise Corrupt("runs/a/b does not match its digest")
    if request.do == "full disk":
        log = f"The end of {workspace.scratch}/rank-0.log"
        raise RuntimeError(f"I/O error: No space left on device (os error 28)\n{log}")
    if request.do == "temporary file":
        return EchoResult(text=tempfile.mkstemp()[1], pid=0, rank_pid=0, calls=0)
    return EchoResult(
        text=request.text, pid=os.getpid(), rank_pid=engine.rank.pid, calls=engine.calls
    )
