"""Starts a program behind a gate: its limits are in force before it begins, and it has no more.

What lies around the gate, a namespace or nothing, is the backend's.
"""

import fcntl
import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Self

from rewards.contract import SandboxLimits
from tasks.reward.supervise import Confined, Processes

INFO, FIRST_FILE = 6, 7
"""Descriptors of the child before its gate: where bubblewrap reports, and the files one by one."""
_JOINED, _GO, _STARTED = 3, 4, 5
_LOWEST_OURS = 64
"""Our own descriptors are moved above this, so that none is overwritten on its way to a child."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # Sets of strings are ordered by hash: without this, a verdict could differ between two runs.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""All that a program finds in its environment, beside where it is at home."""
_MAX_OPEN_FILES = 256
_BLOCK_BYTES = 512
# Limits hold from inside the user namespace, where the kernel counts this sandbox's processes
# alone. bash and dash name the limit of processes differently. The gate's descriptors end here.
_GATE = """
{counted}
ulimit -v {memory_kib} && ulimit -t {cpu_s} && ulimit -f {file_blocks} || exit 125
ulimit -c 0 && ulimit -n {open_files} || exit 125
printf . >&5
read -r go <&4 || exit 125
exec 4<&- 5>&- 6>&-
cd "$1" && shift && exec "$@"
"""


def spawn(
    argv: list[str],
    *,
    stdin: str,
    files: Sequence[bytes],
    joined: int | None,
    processes: Callable[[int, int], Processes],
) -> Confined:
    """Starts a gated command.

    Args:
        argv: ends with what `gated` returned.
        stdin: all that the program can read there.
        files: their contents, each readable at a descriptor from `FIRST_FILE` on.
        joined: a socket that becomes descriptor 3 of the program.
        processes: makes the view of the started processes from the child's id and a descriptor
            that yields what is written to `INFO`.
    """
    with Ends() as ends:
        contents = [ends.move(sealed(content)) for content in (as_bytes(stdin), *files)]
        given = {0: contents[0]} | dict(enumerate(contents[1:], FIRST_FILE))
        stdout, given[1] = ends.pipe()
        stderr, given[2] = ends.pipe()
        given[_GO], go = ends.pipe()
        started, given[_STARTED] = ends.pipe()
        info, given[INFO] = ends.pipe()
        if joined is not None:
            given[_JOINED] = ends.move(os.dup(joined))
        pid = os.posix_spawn(
            argv[0],
            argv,
            ENVIRONMENT,
            file_actions=[
                *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()),
                *((os.POSIX_SPAWN_DUP2, fd, to) for to, fd in given.items()),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ],
        )
        for fd in (stdout, stderr, started, go, info):
            ends.keep(fd)
    return Confined(
        pid=pid,
        stdout=stdout,
        stderr=stderr,
        started=started,
        go=go,
        processes=processes(pid, info),
    )


def gated(
    command: Sequence[str], limits: SandboxLimits, *, processes: int | None, folder: str = "."
) -> list[str]:
    """Returns the command that sets a process's limits, waits, and becomes `command` in `folder`.

    Args:
        command: the program and its arguments.
        limits: what the kernel counts of them for one process is set here.
        processes: how many this user may have; None: not counted.
        folder: where the program starts.
    """
    counted = f"ulimit -u {processes} 2>/dev/null || ulimit -p {processes} || exit 125"
    script = _GATE.format(
        counted=counted if processes else "",
        memory_kib=limits.memory_bytes >> 10,
        cpu_s=math.ceil(limits.cpu_s) + 1,
        file_blocks=-(-limits.file_bytes // _BLOCK_BYTES),
        open_files=_MAX_OPEN_FILES,
    )
    return ["/bin/sh", "-c", script, "gate", folder, *command]


def _inheritable() -> list[int]:
    """Returns descriptors that this process inherited itself: no program shall have them."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
        except OSError:  # The listing itself, or closed meanwhile by another thread.
            continue
    return found


class Ends:
    """Descriptors on their way to a child: closed here afterwards, unless they are kept."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self._open:
            os.close(fd)

    def move(self, fd: int) -> int:
        """Returns a copy of `fd` that no other descriptor of the child overwrites; closes `fd`."""
        try:
            moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_OURS)
        finally:
            os.close(fd)
        self._open.add(moved)
        return moved

    def pipe(self) -> tuple[int, int]:
        """Returns the reading and the writing end of a new pipe."""
        read, write = os.pipe()
        try:
            moved = self.move(read)
        except OSError:
            os.close(write)
            raise
        return moved, self.move(write)

    def keep(self, fd: int) -> None:
        """Leaves `fd` open: it belongs to the caller from now on."""
        self._open.remove(fd)


def as_bytes(text: str) -> bytes:
    """Returns UTF-8; what a model wrote may hold half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")


def sealed(content: bytes) -> int:
    """Returns a descriptor at the start of a file in memory that nobody can change."""
    fd = os.memfd_create("rollbook", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(
        fd,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def inside(name: str) -> str:
    """Returns the path of a program's file.

    Raises:
        ValueError: it leads out of the program's folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(
            f"The file name {name!r} of a program leads out of its folder. Expected a relative "
            "name without '..'."
        )
    return str(path)
