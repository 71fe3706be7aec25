"""Runs programs in namespaces of their own, with bubblewrap (Linux).

Nothing here knows what is graded. How long a program may run is watched in `supervise.py`.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from rewards.contract import Program, ProgramResult, SandboxLimits
from tasks.reward.gate import FIRST_FILE, INFO, as_bytes, gated, inside, spawn
from tasks.reward.holder import PYTHON, NamespaceHolder, tool
from tasks.reward.seccomp import refusing_filter
from tasks.reward.supervise import Confined, ProcessUse, discard, read_use, watch

WORK = "/tmp/work"
"""The folder of a program's files, on its private tmpfs."""

_SHARED_MEMORY_BYTES = 1 << 20
_INODE_BYTES = 1 << 10
"""Of the kernel's memory for a file or folder, even an empty one: a program can make millions."""
_END_POLL_S, _END_LIMIT_S = 0.001, 10.0
_ROOT_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/libx32", "/lib64")

GET_IT = (
    "To get it: apt-get install bubblewrap util-linux. User namespaces must be allowed: sysctl "
    "user.max_user_namespaces=10000, on Debian kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0. In a container: --security-opt "
    "seccomp=unconfined --security-opt systempaths=unconfined (Kubernetes: seccompProfile "
    "Unconfined, procMount Unmasked). Or name a service: reward.sandbox.backend=http and "
    "reward.sandbox.url. Or, for code that you trust, reward.sandbox.allow_unsandboxed=true."
)


class BubblewrapSandbox:
    """Sandboxes of one open backend; use from any thread, as many at once as it has slots."""

    joins = True

    def __init__(self, *, slots: int) -> None:
        """Makes the namespaces that all start from; between calls only their holder runs.

        Raises:
            OSError: bubblewrap or nsenter is missing or does not work.
        """
        self._python = os.path.realpath(sys.executable)
        self._prefix = os.path.realpath(sys.base_prefix)
        self._bwrap = tool("bwrap")
        found = refusing_filter()
        self._filter = [] if found is None else [found]
        self._holder = NamespaceHolder(self._prefix)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._slots.put(slot)

    def death(self) -> str | None:
        """Returns how the holder of all sandboxes ended, or None: whoever opened this may again."""
        code = self._holder.process.poll()
        return None if code is None else f"the holder of all sandboxes ended with {code}"

    def close(self) -> None:
        """Ends whatever still runs; safe to call twice."""
        self._holder.close()

    def run(self, program: Program, *, limits: SandboxLimits) -> ProgramResult:
        """Returns how `program` ended; see `rewards.contract.Sandbox`."""
        with self._slot() as slot:
            return watch([self._start(program, limits, slot)], limits)[0]

    def run_joined(
        self, program: Program, *, checker: Program, limits: SandboxLimits
    ) -> tuple[ProgramResult, ProgramResult]:
        """Returns how both ended; see `rewards.contract.Sandbox`."""
        ours, theirs = socket.socketpair()
        with ours, theirs, self._slot() as slot:
            first = self._start(program, limits, slot, joined=ours.fileno())
            try:
                second = self._start(checker, limits, slot, joined=theirs.fileno())
            except OSError:
                discard(first)
                raise
            ours.close()
            theirs.close()
            left, right = watch([first, second], limits, until="last")
        return left, right

    @contextlib.contextmanager
    def _slot(self) -> Iterator[int]:
        slot = self._slots.get()
        try:
            yield slot
        finally:
            self._slots.put(slot)

    def _start(
        self, program: Program, limits: SandboxLimits, slot: int, joined: int | None = None
    ) -> Confined:
        names = [inside(name) for name in program.files]
        argv = [*self._holder.entering(slot), *self._isolated(limits, names)]
        gate = gated(self._command(program), limits, processes=limits.processes + 1)
        return spawn(
            [*argv, *gate],
            stdin=program.stdin,
            files=[*map(as_bytes, program.files.values()), *self._filter],
            joined=joined,
            processes=partial(_Namespace, self._holder.proc),
        )

    def _isolated(self, limits: SandboxLimits, names: Sequence[str]) -> list[str]:
        prefix = self._prefix
        filtered = ["--seccomp", str(FIRST_FILE + len(names))] if self._filter else []
        paths = [f"{WORK}/{name}" for name in names]
        return [
            self._bwrap,
            *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
            *("--new-session", "--hostname", "sandbox"),
            *("--uid", "1000", "--gid", "1000", "--info-fd", str(INFO)),
            *filtered,
            *_system_folders(),
            *([] if Path(prefix).is_relative_to("/usr") else ["--ro-bind", PYTHON, prefix]),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", str(limits.file_bytes), "--tmpfs", "/tmp", "--dir", WORK),
            *chain(*(("--file", str(fd), name) for fd, name in enumerate(paths, FIRST_FILE))),
            *("--remount-ro", "/proc", "--remount-ro", "/", "--chdir", WORK),
            *("--setenv", "HOME", WORK, "--"),
        ]

    def _command(self, program: Program) -> list[str]:
        first, *rest = program.command
        return [self._python if first == "python" else first, *rest]


class _Namespace:
    """The processes of one sandbox, seen through its own /proc."""

    def __init__(self, all_processes: int, pid: int, info: int) -> None:
        self._all = all_processes
        self._pid = pid
        self._info = info
        self._first = -1
        self._proc = -1
        self._files = -1

    def opened(self) -> None:
        """Finds the first process of the namespace: its death is the death of all."""
        child = json.loads(os.read(self._info, 4096))["child-pid"]
        # A process's folder also stands for it where a signal is sent.
        self._first = os.open(str(child), os.O_DIRECTORY, dir_fd=self._all)
        self._proc = os.open("root/proc", os.O_DIRECTORY, dir_fd=self._first)
        self._files = os.open("root/tmp", os.O_DIRECTORY, dir_fd=self._first)

    def uses(self) -> dict[int, ProcessUse]:
        uses: dict[int, ProcessUse] = {}
        for name in self._pids():
            with contextlib.suppress(OSError):  # It may have ended since it was listed.
                uses[int(name)] = read_use(self._read(f"{name}/stat"), self._task_states(name))
        return uses

    def shared_bytes(self) -> int:
        total = 0
        for name in self._pids():
            with contextlib.suppress(OSError):
                lines = self._read(f"{name}/smaps_rollup").splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line[:4] == b"Pss:")
        return total

    def kernel_bytes(self) -> int:
        found = os.fstatvfs(self._files)
        return (found.f_files - found.f_ffree) * _INODE_BYTES

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._first >= 0:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            else:
                # Not reaped yet, so the number is still its own. The rest waits at a gate that
                # never opens.
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Waits for the end of the namespace, which was killed: it comes in milliseconds."""
        deadline = time.monotonic() + _END_LIMIT_S
        while self._first >= 0 and self._lives() and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
        for fd in (self._info, self._first, self._proc, self._files):
            if fd >= 0:
                os.close(fd)

    def _lives(self) -> bool:
        try:
            os.stat("stat", dir_fd=self._first)
        except OSError:
            return False
        return True

    def _pids(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._proc) if name.isdigit()]
        except OSError:  # The namespace has ended.
            return []

    def _task_states(self, name: str) -> Callable[[], Sequence[bytes]]:
        def states() -> Sequence[bytes]:
            found: list[bytes] = []
            folder = os.open(f"{name}/task", os.O_DIRECTORY | os.O_RDONLY, dir_fd=self._proc)
            try:
                tasks = os.listdir(folder)
            finally:
                os.close(folder)
            for task in tasks:
                with contextlib.suppress(OSError):
                    stat = self._read(f"{name}/task/{task}/stat")
                    found.append(stat[stat.rindex(b")") + 2 :][:1])
            return found

        return states

    def _read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(fd, 1 << 14)
        finally:
            os.close(fd)


def _system_folders() -> list[str]:
    """Returns the arguments that show programs and libraries of this machine, and no more."""
    words = ["--ro-bind", "/usr", "/usr"]
    for folder in _ROOT_FOLDERS:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    return [*words, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
