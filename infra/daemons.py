"""Starts, recognises and stops background processes of this host. Standard library only.

A daemon is remembered by pid, start time and boot, so that a recycled pid is never taken for it.
Which daemons there are is the business of the files beside this one.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_POLL_S = 0.05
_TAIL_LINES = 8
_MOST_STARTS = 5


class ServiceError(Exception):
    """A local service did not start or stop; the message says why and what to do."""


@dataclass(frozen=True)
class Daemon:
    """One started process, the leader of its own session and group."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str
    log: str
    ports: dict[str, int]

    def is_alive(self) -> bool:
        """Tells whether this very process still runs."""
        return self.boot_id == _boot_id() and _start_ticks(self.pid) == self.start_ticks

    def listens(self, port: int) -> bool:
        """Tells whether it is this very process that listens on a TCP port of this host."""
        ours: set[str] = set()
        for descriptor in Path(f"/proc/{self.pid}/fd").glob("*"):
            # One may close meanwhile, and so may the process.
            with contextlib.suppress(OSError):
                ours.add(os.readlink(descriptor))
        return any(f"socket:[{inode}]" in ours for inode in _listening(port))

    def save(self, state_file: Path) -> None:
        """Remembers this daemon for later processes."""
        draft = state_file.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(state_file)


def recall(state_file: Path) -> Daemon | None:
    """Returns the daemon that `save` remembered, alive or not."""
    if not state_file.is_file():
        return None
    return Daemon(**json.loads(state_file.read_text()))


@dataclass(frozen=True)
class Command:
    """How to start a daemon."""

    name: str
    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    """Set over this process's environment."""
    ports: dict[str, int]
    """By role; only remembered."""


def spawn(command: Command) -> Daemon:
    """Starts a process that outlives this one, in its own session, output to its log.

    Raises:
        ServiceError: the program cannot be executed.
    """
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with command.log.open("ab") as log:
        try:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=command.log.parent,
                env={**os.environ, **command.environment},
            )
        except OSError as error:
            raise ServiceError(
                f"{command.name} cannot start: {error}. Run `make install`."
            ) from error
    _STARTED[process.pid] = process
    ticks = _start_ticks(process.pid) or 0
    return Daemon(
        command.name, process.pid, ticks, _boot_id(), str(command.log), dict(command.ports)
    )


_STARTED: dict[int, "subprocess.Popen[bytes]"] = {}
"""Our own children: collected when they end, or they would stay as zombies."""


def wait_until(daemon: Daemon, ready: Callable[[], bool], *, limit_s: float) -> None:
    """Waits until `ready()` holds.

    Raises:
        ServiceError: the daemon ended, or the time is over; with the last lines of its log.
    """
    deadline = time.monotonic() + limit_s
    while not ready():
        if not daemon.is_alive():
            raise ServiceError(f"{daemon.name} ended while starting.{_log_tail(daemon)}")
        if time.monotonic() > deadline:
            stop(daemon)
            raise ServiceError(
                f"{daemon.name} was not ready after {limit_s:.0f} s.{_log_tail(daemon)}"
            )
        time.sleep(_POLL_S)


def start_listening(start: Callable[[], Daemon], wait: Callable[[Daemon], None]) -> Daemon:
    """Starts a daemon that listens; again while others take its ports before it has them.

    Args:
        start: chooses free ports, every time that it is called.
        wait: raises ServiceError unless the daemon serves.

    Raises:
        ServiceError: it does not serve, and its ports are not the reason; or each time they were.
    """
    for left in reversed(range(_MOST_STARTS)):
        daemon = start()
        try:
            wait(daemon)
        except ServiceError:
            if not left or free_ports(daemon.ports) == daemon.ports:
                raise
        else:
            return daemon
    raise AssertionError("unreachable")


def stop(daemon: Daemon, *, how: signal.Signals = signal.SIGTERM, grace_s: float = 10.0) -> None:
    """Ends a daemon and its group: `how` first, SIGKILL after `grace_s`. Safe if it is gone."""
    if not daemon.is_alive():
        return
    os.kill(daemon.pid, how)
    deadline = time.monotonic() + grace_s
    while daemon.is_alive() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # The leader's pid names the group while any member lives, and is not given out again.
    try:
        os.killpg(daemon.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    while daemon.is_alive():
        time.sleep(_POLL_S)


def answers(daemon: Daemon, role: str, path: str, *, status: int = 200) -> bool:
    """Tells whether a daemon answers a GET of `path` at its port for `role` with `status`.

    Itself: two homes that start at once may choose one port, and the other's server answers too.
    """
    port = daemon.ports[role]
    if not daemon.listens(port):
        return False
    url = f"http://127.0.0.1:{port}{path}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return answer.status == status
    except urllib.error.HTTPError as error:
        with error:
            return error.code == status
    except OSError:
        return False


def free_port(preferred: int | None = None) -> int:
    """Returns `preferred` if nobody listens there on loopback, else a free port."""
    for candidate in (preferred or 0, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServiceError("No port of 127.0.0.1 is free.")


def free_ports(remembered: Mapping[str, int]) -> dict[str, int]:
    """Returns a free port for every role, the remembered one where it still is free."""
    chosen: dict[str, int] = {}
    for role, port in remembered.items():
        while (found := free_port(port)) in chosen.values():
            port = 0
        chosen[role] = found
    return chosen


def _log_tail(daemon: Daemon) -> str:
    lines = [
        line.rstrip()
        for line in Path(daemon.log).read_text(errors="replace").splitlines()
        if line.strip()
    ]
    return f"\nThe end of its log, {daemon.log}:\n" + "\n".join(
        f"  | {line}" for line in lines[-_TAIL_LINES:]
    )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _listening(port: int) -> list[str]:
    """Returns the inodes of the sockets that listen on a port."""
    rows: list[list[str]] = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.is_file():
            rows += [line.split() for line in table.read_text().splitlines()[1:]]
    local, state, inode = 1, 3, 9
    return [
        row[inode] for row in rows if row[local].endswith(f":{port:04X}") and row[state] == "0A"
    ]


def _start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if it has ended."""
    child = _STARTED.get(pid)
    if child is not None and child.poll() is not None:
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    state, num_threads, start_ticks = fields[0], int(fields[17]), int(fields[19])
    # The first thread may be gone while others still hold the ports.
    return None if state == "Z" and num_threads <= 1 else start_ticks
