"""Where a model is made before it is moved into place; what dead makers left is swept."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".making-"


@contextlib.contextmanager
def open_landing(parent: Path) -> Iterator[Path]:
    """Yields an empty directory in `parent`, removed at the end.

    Safe in several processes at once: a landing lives as long as the lock on it is held, and the
    kernel drops the lock of a process however it ends.

    Raises:
        OSError: it cannot be made (disk full, no permission).
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{PREFIX}*"):
        _remove_if_dead(left)
    landing, lock = _make_locked(parent)
    try:
        yield landing
    finally:
        shutil.rmtree(landing, ignore_errors=True)
        os.close(lock)


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        landing = Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        lock = _open(landing)
        if lock is None:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A sweeper may have removed the directory between the two calls.
        if landing.exists():
            return landing, lock
        os.close(lock)


def _remove_if_dead(landing: Path) -> None:
    lock = _open(landing)
    if lock is None:
        return
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(landing, ignore_errors=True)
    os.close(lock)


def _open(landing: Path) -> int | None:
    try:
        return os.open(landing, os.O_RDONLY)
    except FileNotFoundError:
        return None
