"""Answers of services that were asked before: in memory, and on disk where there is a directory.

Disposable: a lost or broken file is asked for again. Requests, headers and tokens are not kept.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MAX_IN_MEMORY = 4096
_MAX_FILES = 50_000
_TRIM_EVERY = 5000
_MAX_ANSWER_BYTES = 1 << 18
"""Larger answers are no scores; they are not kept."""


class Answers:
    """Answers by key (hexadecimal); use from any thread, and one directory from any process."""

    def __init__(self, directory: Path | None, *, max_files: int = _MAX_FILES) -> None:
        """Opens `directory`, deleting the oldest files beyond `max_files`; None: memory only."""
        self._directory = directory
        self._max_files = max_files
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._written = 0
        if directory is not None:
            _trim(directory, max_files)

    def get(self, key: str) -> Any | None:
        """Returns the answer kept under `key`, a fresh copy, or None."""
        with self._lock:
            payload = self._recent.get(key)
        if payload is None and self._directory is not None:
            payload = _read(_path(self._directory, key))
        return None if payload is None else json.loads(payload)

    def put(self, key: str, answer: Any) -> None:
        """Keeps `answer` under `key`; a disk that is full or read-only costs only the file."""
        payload = json.dumps(answer).encode()
        if len(payload) > _MAX_ANSWER_BYTES:
            return
        with self._lock:
            self._recent[key] = payload
            if len(self._recent) > _MAX_IN_MEMORY:
                self._recent.popitem(last=False)
            self._written += 1
            trim = self._written % min(_TRIM_EVERY, self._max_files) == 0
        if self._directory is None:
            return
        try:
            _write(_path(self._directory, key), payload)
        except OSError as error:
            logger.warning("An answer is not kept on disk: %s", error)
        if trim:
            _trim(self._directory, self._max_files)


def _path(directory: Path, key: str) -> Path:
    return directory / key[:2] / key


def _read(path: Path) -> bytes | None:
    """Returns what was written; None if it is not there, or not whole."""
    try:
        digest, _, payload = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return payload if digest == _digest(payload) else None


def _write(path: Path, payload: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        draft.write_bytes(_digest(payload) + b"\n" + payload)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode()


def _trim(directory: Path, max_files: int) -> None:
    """Deletes the oldest tenth of what is allowed, and what is beyond it; others may do so too."""
    found = sorted(_files(directory))
    if len(found) > max_files:
        for _, path in found[: len(found) - max_files + max_files // 10]:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _files(directory: Path) -> Iterator[tuple[float, str]]:
    for path in directory.glob("[0-9a-f][0-9a-f]/*"):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_mtime, str(path)
