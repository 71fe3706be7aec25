"""Holds the outer namespaces from which all sandboxes of one backend start, and which end with it.

The kernel kills every process of a process namespace when its first one ends, and that one ends
when a pipe of this process closes: however a grader dies, and whatever a sandbox was just doing,
nothing survives. bubblewrap's own --die-with-parent leaves a child behind that is killed while it
waits for its user mapping (0.8).
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

PYTHON = "/tmp/python"
"""Where the interpreter is bound in the outer mount namespace: any user can read it there."""
# A new /proc may be mounted only where one that hides nothing is in sight: that of the machine,
# which gives its place to the one of these namespaces.
_MACHINES_PROC = "/tmp/proc"
_HIGHEST_USER = 2_000_000_000
# Ignoring the ends of its children, it leaves none of those that it inherits a zombie.
_HOLD = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b"\\n")
os.read(0, 1)
"""


class NamespaceHolder:
    """An idle process in namespaces of its own. Its descriptors are all that sandboxes need."""

    def __init__(self, prefix: str) -> None:
        """Starts the process and waits until its namespaces stand.

        Args:
            prefix: the folder of the interpreter.

        Raises:
            OSError: bubblewrap or nsenter is missing or does not work.
        """
        self._is_root = os.geteuid() == 0
        self._nsenter = tool("nsenter")
        self._stack = ExitStack()
        try:
            self._hold(prefix)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process and whatever still runs in its namespaces; safe to call twice."""
        self._stack.close()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The process that started the idle one, and ends with it."""
        return self._process

    def entering(self, slot: int) -> list[str]:
        """Returns the words before a command that run it in the namespaces.

        As root it runs as a high user id of its slot: root's processes are exempt from the limit
        on processes, and root's files are open to them.
        """
        ours = f"/proc/{os.getpid()}/fd"
        words = [self._nsenter, f"--mount={ours}/{self._mount}", f"--pid={ours}/{self._pid}"]
        if self._is_root:
            user = _highest_user() - slot
            return [*words, f"--setuid={user}", f"--setgid={user}", "--"]
        return [*words, f"--user={ours}/{self._user}", "--preserve-credentials", "--"]

    def _hold(self, prefix: str) -> None:
        info, told = os.pipe()
        self._stack.callback(os.close, info)
        # The interpreter's own place may be hidden: a checkout in /tmp is.
        python = os.path.relpath(os.path.realpath(sys.executable), prefix)
        argv = [
            *(tool("bwrap"), "--dev-bind", "/", "/", "--unshare-pid", "--info-fd", str(told)),
            *([] if self._is_root else ["--unshare-user"]),
            *("--tmpfs", "/tmp", "--dev-bind", "/proc", _MACHINES_PROC, "--proc", "/proc"),
            *("--ro-bind", prefix, PYTHON),
            *("--as-pid-1", "--", f"{PYTHON}/{python}", "-I", "-S", "-c", _HOLD),
        ]
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[told],
                start_new_session=True,
            )
        finally:
            os.close(told)
        self._process = process
        self._stack.enter_context(process)  # Closes its pipes, which ends it, and reaps it.
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            said = process.stderr.read().decode("utf-8", "replace").strip()
            raise OSError(f"bubblewrap does not start: {said[-500:]}")
        first = json.loads(os.read(info, 4096))["child-pid"]
        self._mount = self._open(f"/proc/{first}/ns/mnt")
        self._pid = self._open(f"/proc/{first}/ns/pid")
        self._user = self._open(f"/proc/{first}/ns/user")
        self.proc = self._open(f"/proc/{first}/root/proc")
        """The folder of all processes of all sandboxes."""

    def _open(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY)
        self._stack.callback(os.close, fd)
        return fd


def tool(name: str) -> str:
    """Returns the path of a program of this machine.

    Raises:
        OSError: there is none of that name.
    """
    path = shutil.which(name)
    if path is None:
        raise OSError(f"there is no {name} on PATH")
    return path


def _highest_user() -> int:
    """Returns a user id far above those in use; in a container, the highest that it maps."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [[int(word) for word in line.split()] for line in lines]
    return min(max(start + count for start, _, count in ranges) - 1, _HIGHEST_USER)
