"""A process that loads the scoring functions once and forks every grading process from itself.

Loading costs about a second, a fork costs milliseconds: so a worker that was killed or has graded
its share is replaced at once, and workers share the memory of what was loaded. Pool and nursery
talk over one socket; a worker's pipes are passed through it, and never used by the nursery.
"""

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards import SCORERS, scorer
from tasks.processes import kill_group
from tasks.reward import worker

_START, _END, _READY = b"s", b"e", b"r"
_REPLY = struct.Struct("=cii")
_PID = struct.Struct("=i")


class NurseryGone(OSError):
    """The nursery has ended; its log says why."""


class Nursery:
    """The pool's side of it. Not safe to use from two threads at once."""

    def __init__(self, kinds: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        """Starts the process and returns at once; it loads `kinds` meanwhile."""
        self._socket, theirs = socket.socketpair()
        with log.open("ab") as stderr, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks.reward.nursery", str(theirs.fileno()), *kinds],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._started: deque[int] = deque()
        self._ended: dict[int, int] = {}
        self.is_ready = False

    def fileno(self) -> int:
        """Returns what to select on: it is readable when a reply has come or the process ended."""
        return self._socket.fileno()

    def ask_for_worker(self, requests: int, results: int, log: int) -> None:
        """Has a worker forked that reads `requests`; `next_pid` gives its process id, in order.

        Raises:
            NurseryGone: it has ended.
        """
        try:
            socket.send_fds(self._socket, [_START], [requests, results, log])
        except OSError as error:
            raise NurseryGone(str(error)) from error

    def read(self) -> None:
        """Takes one reply; blocks until there is one.

        Raises:
            NurseryGone: it has ended.
        """
        try:
            reply = self._socket.recv(_REPLY.size, socket.MSG_WAITALL)
        except OSError as error:
            raise NurseryGone(str(error)) from error
        if len(reply) < _REPLY.size:
            raise NurseryGone("the nursery closed its socket")
        kind, pid, status = _REPLY.unpack(reply)
        if kind == _READY:
            self.is_ready = True
        elif kind == _START:
            self._started.append(pid)
        else:
            self._ended[pid] = status

    def read_waiting(self) -> None:
        """Takes the replies that are there, if any.

        Raises:
            NurseryGone: it has ended.
        """
        while self._is_readable():
            self.read()

    def next_pid(self) -> int | None:
        """Returns the process id of the worker asked for first among those not told yet."""
        return self._started.popleft() if self._started else None

    def end_worker(self, pid: int) -> int:
        """Kills the group of a worker, and returns how the worker itself had ended before.

        Its process id belongs to nobody else until this call: only here is it reaped.

        Raises:
            NurseryGone: it has ended.
        """
        try:
            self._socket.sendall(_END + _PID.pack(pid))
        except OSError as error:
            raise NurseryGone(str(error)) from error
        while pid not in self._ended:
            self.read()
        return self._ended.pop(pid)

    def kill(self) -> int:
        """Ends the nursery, not its workers, and returns its exit code."""
        self._socket.close()
        if self._process.poll() is None:
            kill_group(self._process.pid)
        return self._process.wait()

    def _is_readable(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # `read` says what it means.
            return True
        return True


def main() -> None:
    """Loads the scoring functions named in the arguments, then forks on request."""
    control = socket.socket(fileno=int(sys.argv[1]))
    kinds = sys.argv[2:]
    for kind in kinds:
        _load(kind)
    gc.collect()
    gc.freeze()  # Collections in the workers leave the shared pages alone.
    forks = _num_threads() == 1
    control.sendall(_REPLY.pack(_READY, 0, 0))
    while True:
        command, fds, _, _ = socket.recv_fds(control, 1, 3)
        if command == _START:
            pid = _fork(control, fds) if forks else _execute(kinds, fds)
            for fd in fds:
                os.close(fd)
            control.sendall(_REPLY.pack(_START, pid, 0))
        elif command == _END:
            (pid,) = _PID.unpack(control.recv(_PID.size, socket.MSG_WAITALL))
            control.sendall(_REPLY.pack(_END, pid, _reap(pid)))
        else:
            return


def _load(kind: str) -> None:
    """Loads a scoring function; those of this house also work once, so that caches are filled."""
    module: Any = scorer(kind)
    if kind in SCORERS:
        for example in module.GOLD:
            module.score(example.item, module.Config(**example.options))


def _num_threads() -> int:
    """Counts native threads too: a fork would leave their locks behind."""
    if sys.platform != "linux":
        return 2
    return len(os.listdir("/proc/self/task"))


def _fork(control: socket.socket, fds: Sequence[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        control.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        worker.serve()
    finally:
        os._exit(1)


def _execute(kinds: Sequence[str], fds: Sequence[int]) -> int:
    requests, results, log = fds
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.reward.worker", *kinds],
        stdin=requests,
        stdout=results,
        stderr=log,
        start_new_session=True,
    ).pid


def _reap(pid: int) -> int:
    # Before the wait: as long as the leader is not reaped, its group id is nobody else's.
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):  # It had not made its own group yet.
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
