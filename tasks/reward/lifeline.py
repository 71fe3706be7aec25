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

from tasks.processes import kill_group, kill_rest_of_own_group

GRACE_S = 8.0
"""How long the command may take to end when it is told to."""


def main() -> int:
    """Returns the command's exit code; nothing of its group is left."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(process,), daemon=True).start()
    code = process.wait()
    kill_rest_of_own_group()
    return code if code >= 0 else 128 - code


def _end_with_parent(process: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    kill_group(os.getpid())


if __name__ == "__main__":
    sys.exit(main())
