"""Hashes a safetensors file and each of its tensors while its bytes pass by once."""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage.safetensors_files import MAX_HEADER_BYTES

TensorRow = list[Any]
"""What a policy digest is taken over: name, dtype, shape, sha256."""


class TensorHasher:
    """Takes a file in pieces of any size; `rows` and `hexdigest` are asked for at the end."""

    def __init__(self, num_bytes: int) -> None:
        """Takes the size of the file, which no tensor may exceed."""
        self._num_bytes = num_bytes
        self._whole = hashlib.sha256()
        self._head = b""
        self._offset = 0
        self._spans: list[_Span] | None = None
        self._open = 0
        self._is_sound = True

    def update(self, chunk: bytes) -> None:
        """Takes the next bytes of the file."""
        self._whole.update(chunk)
        if not self._is_sound:
            return
        if self._spans is None:
            self._head += chunk
            chunk = self._read_header()
        if self._spans is not None:
            self._hash(chunk)

    def hexdigest(self) -> str:
        """Returns the sha256 of all bytes."""
        return self._whole.hexdigest()

    def rows(self) -> list[TensorRow] | None:
        """Returns [name, dtype, shape, sha256] of each tensor, or None if it is no safetensors."""
        ended = self._spans is not None and self._offset == self._num_bytes
        if not self._is_sound or not ended or self._spans is None:
            return None
        return [[span.name, span.dtype, span.shape, span.hash.hexdigest()] for span in self._spans]

    def _read_header(self) -> bytes:
        """Returns the bytes after the header once it is whole."""
        if len(self._head) < 8:
            return b""
        length = struct.unpack("<Q", self._head[:8])[0]
        if length > min(MAX_HEADER_BYTES, self._num_bytes - 8):
            self._is_sound = False
            return b""
        if len(self._head) < 8 + length:
            return b""
        self._spans = _parsed_spans(self._head[8 : 8 + length], 8 + length, self._num_bytes)
        self._is_sound = self._spans is not None
        self._offset = 8 + length
        rest, self._head = self._head[8 + length :], b""
        return rest

    def _hash(self, chunk: bytes) -> None:
        assert self._spans is not None
        view = memoryview(chunk)
        for span in self._spans[self._open :]:
            start, stop = max(span.start, self._offset), min(span.stop, self._offset + len(view))
            if start < stop:
                span.hash.update(view[start - self._offset : stop - self._offset])
            if span.stop > self._offset + len(view):
                break
            self._open += 1
        self._offset += len(view)


@dataclass
class _Span:
    """One tensor: bytes [`start`, `stop`) of the file."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    stop: int
    hash: Any


def _parsed_spans(header: bytes, data_start: int, num_bytes: int) -> list[_Span] | None:
    """Returns the tensors in the order of their bytes, or None if they are not described so."""
    try:
        entries: dict[str, Any] = json.loads(header)
        spans = [
            _span(name, entry, data_start)
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    spans.sort(key=lambda span: (span.start, span.stop))
    return spans if _lie_apart(spans, data_start, num_bytes) else None


def _span(name: str, entry: Any, data_start: int) -> _Span:
    first, last = entry["data_offsets"]
    return _Span(
        name=name,
        dtype=str(entry["dtype"]),
        shape=[int(size) for size in entry["shape"]],
        start=data_start + int(first),
        stop=data_start + int(last),
        hash=hashlib.sha256(),
    )


def _lie_apart(spans: Sequence[_Span], data_start: int, num_bytes: int) -> bool:
    edges = [data_start, *(edge for span in spans for edge in (span.start, span.stop)), num_bytes]
    return edges == sorted(edges)
