"""Runs a command that ends with the process that started this one, however that ends.

`python -m tasks.reward.lifeline COMMAND...`: started as the leader of a session, with a pipe as
standard input that is never written to. The pipe closes when its writer closes it or dies; then
the command is told to end, and after a moment everything of the group is killed.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time

import psutil

from tasks.processes import kill_group, kill_rest_of_own_group

GRACE_S = 8.0
"""How long the command may take to end when it is told to."""
_REST_S = 2.0
"""And then what it started: one of them gives shared memory back."""
_POLL_S = 0.05


def main() -> int:
    """Returns the command's exit code; nothing of its group is left."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(process,), daemon=True).start()
    code = process.wait()
    deadline = time.monotonic() + _REST_S
    while _others_of_own_group() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    kill_rest_of_own_group()
    return code if code >= 0 else 128 - code


def _end_with_parent(process: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        kill_group(os.getpid())


def _others_of_own_group() -> bool:
    for process in psutil.process_iter():
        # A process may end between the listing and the questions.
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if process.pid == os.getpid() or os.getpgid(process.pid) != os.getpgrp():
                continue
            # Dead ones stay until somebody collects them, which is not our part.
            if process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
