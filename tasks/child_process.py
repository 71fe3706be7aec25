"""One run of `tasks.service` as a child process: started, watched, ended, its log quoted."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.records import InputRef
from storage.store_config import StoreConfig
from tasks.errors import Permanent, Transient
from tasks.processes import end_group, kill_group_with_leader
from tasks.service_contract import ServiceSpec

CLOSE_GRACE_S = 8.0
_TAIL_LINES = 12
_TAIL_BYTES = 16384
_ROOM_BYTES = 1 << 20
"""With less than this left, a child may have failed for it, and its log may miss the end."""


@dataclass(frozen=True)
class Face:
    """Where a child listens for the controllers of one run, and who may speak to it."""

    run: str
    token: str
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    drain_s: float = 0.0
    """How long a call in flight may go on when the child is told to end."""


@dataclass(frozen=True)
class ChildSpec:
    """What a child process serves, and how it is started."""

    name: str
    """What people call it: `rollout`, `train`; names its log file."""
    stage: str
    engine: str
    config: dict[str, Any]
    model: InputRef
    store: StoreConfig
    home: Path
    log_dir: Path
    """`<name>.log` is appended to here."""
    python: str = sys.executable
    """Interpreter of the engine's environment."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Set over this process's environment."""
    writing: bool = True
    """False opens the store for reading."""
    face: "Face | None" = None
    """How others than this process reach it; None: nobody does."""

    @property
    def log_path(self) -> Path:
        """Where the child's output goes."""
        return self.log_dir / f"{self.name}.log"


@dataclass(frozen=True)
class ChildProcess:
    """A started child: a session and process group of its own, and the files we talk through."""

    spec: ChildSpec
    process: "subprocess.Popen[bytes]"
    directory: Path
    log_start: int

    @property
    def pid(self) -> int:
        """The service's process id, which is also its group's."""
        return self.process.pid

    def address(self) -> tuple[str, str] | None:
        """Returns the service's URL and token, or None while it does not listen yet."""
        port_file = self.directory / "port"
        if not port_file.exists():
            return None
        face = self.spec.face
        host = face.host if face and face.host != "0.0.0.0" else "127.0.0.1"
        return f"http://{host}:{port_file.read_text()}", (self.directory / "token").read_text()

    def is_dead(self, *, within_s: float = 0.0) -> bool:
        """Tells whether the process has ended, or does so within a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        return self.process.returncode is not None

    def death(self) -> Transient | Permanent:
        """Returns the error that says how the process ended, with the end of its log."""
        code = self.process.returncode
        named = f"The {self.spec.name} process {self.pid}"
        full = _full_disk(self.spec.log_dir)
        if code > 0:
            return self.with_log(Permanent(f"{named} ended with exit code {code}.{full}"))
        how = f"was ended by signal {-code}" if code else "was told to end"
        hint = " (often: memory ran out)" if code == -9 else ""
        words = f"{named} {how}{hint}. The next call starts another.{full}"
        return self.with_log(Transient(words))

    def with_log(self, error: Transient | Permanent) -> Transient | Permanent:
        """Returns `error` with the last lines of this process's log, and where the log lies."""
        lines = last_lines(self.spec.log_path, start=self.log_start)
        tail = "\n".join(f"  | {line}" for line in lines)
        return type(error)(f"{error}\nThe end of its log, {self.spec.log_path}:\n{tail}")

    def end(self, *, grace_s: float | None = None) -> None:
        """Ends the process and all that it started. Safe to call twice.

        Args:
            grace_s: how long it may take before everything is killed; default: a call in flight
                its time, and its engine some seconds to close.
        """
        drain_s = self.spec.face.drain_s if self.spec.face else 0.0
        end_group(self.process, grace_s=drain_s + CLOSE_GRACE_S if grace_s is None else grace_s)
        assert self.process.stdin is not None
        self.process.stdin.close()
        # A service that was killed while it wrote may have left a draft here.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)


def launch(spec: ChildSpec, *, scratch: Path) -> ChildProcess:
    """Starts the child and returns at once.

    Raises:
        Permanent: there is no such interpreter, or the files cannot be written that it reads.
    """
    directory = scratch / f"{spec.name}-{secrets.token_hex(6)}"
    try:
        _make_talking_place(spec, directory)
    except OSError as error:
        raise Permanent(
            f"The {spec.name} process cannot start: its files in {directory} cannot be written: "
            f"{error.strerror}. Free space there (all of {spec.home / 'cache'} may be deleted), "
            "or set ROLLBOOK_HOME to a larger disk, then resume."
        ) from error
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    with spec.log_path.open("ab") as log:
        log_start = log.seek(0, os.SEEK_END)
        process = _popen(spec, spec_file=directory / "spec.json", log=log.fileno())
    kill_group_with_leader(process.pid)
    return ChildProcess(spec, process, directory, log_start)


def _make_talking_place(spec: ChildSpec, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    token = spec.face.token if spec.face else secrets.token_urlsafe(32)
    _write_private(directory / "token", token)
    _write_private(directory / "spec.json", _service_spec(spec, directory).to_bytes().decode())


def _popen(spec: ChildSpec, *, spec_file: Path, log: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            [spec.python, "-m", "tasks.service", "--spec", str(spec_file)],
            stdin=subprocess.PIPE,  # Never written to: it closes when this process ends.
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment},
        )
    except OSError as error:
        raise Permanent(
            f"The {spec.name} process cannot start: {error}. Expected the interpreter of the "
            f"engines' environment at {spec.python}. Run `make install`, or set "
            f"{spec.name}.python."
        ) from error


def _service_spec(spec: ChildSpec, directory: Path) -> ServiceSpec:
    return ServiceSpec(
        stage=spec.stage,
        engine=spec.engine,
        config=spec.config,
        model=spec.model,
        store=spec.store,
        writing=spec.writing,
        home=str(spec.home),
        token_file=str(directory / "token"),
        port_file=str(directory / "port"),
        parent_pid=os.getpid(),
        **_face_fields(spec.face),
    )


def _face_fields(face: Face | None) -> dict[str, Any]:
    if face is None:
        return {}
    return {"run": face.run, "host": face.host, "port": face.port, "drain_s": face.drain_s}


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def last_lines(log: Path, *, start: int = 0, noise: re.Pattern[str] | None = None) -> list[str]:
    """Returns the last lines of a log from byte `start` on, without blank ones and `noise`."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    lines = [line.rstrip() for line in text.splitlines()]
    said = [line for line in lines if line.strip() and not (noise and noise.match(line))]
    return said[-_TAIL_LINES:]


def _full_disk(directory: Path) -> str:
    """Returns what to say of a death if hardly anything can be written there; empty if it can."""
    free = shutil.disk_usage(directory).free
    if free >= _ROOM_BYTES:
        return ""
    return f" The disk of {directory} is full ({free} bytes free): free space there, then resume."
