"""How processes of a stage end together; no engine and no HTTP in here."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends.

    For processes that an engine starts (trainer ranks): they end even if the service is killed
    with SIGKILL. The service starts and calls its engine on one thread that lives as long as the
    service does. Does nothing on platforms other than Linux.

    Args:
        parent_pid: who started this process; if it is gone already, this process ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_group(pgid: int) -> None:
    """Kills every process of a group; does nothing if none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)


def kill_group_with_leader(pid: int) -> None:
    """Kills the rest of a child's group as soon as the child, its leader, ends, however it ends."""
    threading.Thread(target=_kill_what_is_left, args=(pid,), daemon=True).start()


def _kill_what_is_left(pid: int) -> None:
    # WNOWAIT leaves the pid taken until Popen collects it, so the group cannot be another's.
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    kill_group(pid)


def kill_rest_of_own_group() -> None:
    """Kills every other process of this process's group, those of dead parents included."""
    group = os.getpgrp()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        # A process may end between the listing and the question.
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group:
                process.kill()


def end_group(process: "subprocess.Popen[bytes]", *, grace_s: float = 8.0) -> None:
    """Ends a process that leads its own group, and whatever it started.

    SIGTERM to the leader, which may clean up for `grace_s`; then SIGKILL to the group. Safe to
    call twice and on a process that has ended.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    kill_group(process.pid)
    process.wait()
