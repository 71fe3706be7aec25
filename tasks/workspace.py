"""Where a stage may put local files; nothing in here is ever the only copy of anything."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workspace:
    """Two directories of this host."""

    cache: Path
    """Content addressed, disposable, shared by processes of this host."""
    scratch: Path
    """Private to this process, removed at its end."""


@contextmanager
def open_workspace(home: Path) -> Iterator[Workspace]:
    """Yields a workspace under `home`; first sweeps the scratch of processes that died.

    Safe to use from several processes at once: a scratch directory lives as long as its lock is
    held, and the kernel drops the lock of a process however it ends.

    Raises:
        OSError: the directories cannot be made (disk full, no permission).
    """
    cache = home / "cache"
    root = home / "scratch"
    cache.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    lock = root / f"{os.getpid()}-{uuid.uuid4().hex[:12]}.lock"
    descriptor = _create_locked(lock)
    scratch = lock.with_suffix("")
    scratch.mkdir(mode=0o700)
    try:
        yield Workspace(cache=cache, scratch=scratch)
    finally:
        _remove(lock)
        os.close(descriptor)


def _create_locked(lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A sweeper may have unlinked the file between the two calls: then the lock is on nothing.
        if lock.exists() and os.fstat(descriptor).st_ino == lock.stat().st_ino:
            return descriptor
        os.close(descriptor)


def _sweep(root: Path) -> None:
    for lock in root.glob("*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        _remove(lock)
        os.close(descriptor)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
