"""Where a stage may put local files; nothing in here is ever the only copy of anything."""

import errno
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


CACHE_VARIABLE = "ROLLBOOK_CACHE_GIB"
_DEFAULT_CACHE_GIB = 20.0
_SMALL_BYTES = 1 << 20
"""Smaller files (tokenizers, probes) are never trimmed: they are what everything starts with."""


_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


def full_disk(workspace: Workspace, text: str) -> str:
    """Returns what an error message on a full disk lacks: where, and what to do.

    Empty if its first line speaks of nothing of the kind, or names the place. Goes by words:
    libraries and trainer ranks pass no error number on.
    """
    cause = text.partition("\n")[0]
    places = (workspace.scratch.parent, workspace.cache)
    if not any(word in cause for word in _FULL) or any(str(place) in cause for place in places):
        return ""
    scratch, cache = (f"{place} ({shutil.disk_usage(place).free} bytes free)" for place in places)
    return (
        f"Local files lie in {scratch} and {cache}. Free space there (all of the cache may be "
        "deleted), or set ROLLBOOK_HOME to a larger disk, then resume."
    )


def trim_cache(cache: Path) -> None:
    """Deletes the oldest large files of the cache until it fits `ROLLBOOK_CACHE_GIB` (20).

    Only what is named by its digest: policies and snapshots, which their readers fetch again.
    """
    limit = int(float(os.environ.get(CACHE_VARIABLE, _DEFAULT_CACHE_GIB)) * (1 << 30))
    found = sorted(_large_files(cache))
    excess = sum(num_bytes for _, num_bytes, _ in found) - limit
    for _, num_bytes, path in found:
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= num_bytes


def _large_files(cache: Path) -> Iterator[tuple[float, int, Path]]:
    for path in cache.glob("[0-9a-f][0-9a-f]/*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if status.st_size >= _SMALL_BYTES:
            yield status.st_mtime, status.st_size, path


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
    trim_cache(cache)
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
