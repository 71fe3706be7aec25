"""Safetensors files as raw bytes: read headers, hash tensors, write shards. No torch, no numpy.

bfloat16 stays what it is, two bytes a number; nothing here looks at values.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from storage.errors import Corrupt

MAX_HEADER_BYTES = 100_000_000
"""What the reference implementation accepts."""

NUM_HASHERS = 4
"""Threads that hash; hashing lets other threads run."""


@dataclass(frozen=True)
class TensorSlice:
    """Where one tensor's bytes lie: [`start`, `stop`) of `path`. `dtype` as in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class RawTensor:
    """One tensor to write: `payload` is its little-endian bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    payload: bytes | memoryview


def tensor_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a directory in name order.

    Raises:
        ValueError: there are none.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"No *.safetensors in {directory}. Expected the weights of a policy.")
    return files


def read_header(path: Path) -> list[TensorSlice]:
    """Returns the tensors of one file.

    Raises:
        Corrupt: the header does not parse, or names bytes that the file does not have.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, num_bytes - 8):
            raise Corrupt(f"{path} is not a safetensors file: its header is cut off.")
        header = _parsed_header(path, file.read(length))
    slices = [
        _slice(path, name, entry, data_start=8 + length)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    for tensor in slices:
        if not 8 + length <= tensor.start <= tensor.stop <= num_bytes:
            raise Corrupt(
                f"{path} names bytes {tensor.start} to {tensor.stop} for {tensor.name}, but has "
                f"{num_bytes}. Expected a whole file: write it again."
            )
    return slices


def read_headers(directory: Path) -> dict[str, TensorSlice]:
    """Returns all tensors of a directory by name, in name order.

    Raises:
        ValueError: no files, or one name in two files.
        Corrupt: a header does not parse.
    """
    found: dict[str, TensorSlice] = {}
    for path in tensor_files(directory):
        for tensor in read_header(path):
            if tensor.name in found:
                raise ValueError(
                    f"Tensor {tensor.name} is in {path.name} and {found[tensor.name].path.name}. "
                    "Expected it once."
                )
            found[tensor.name] = tensor
    return dict(sorted(found.items()))


def hash_tensors(tensors: Mapping[str, TensorSlice]) -> dict[str, str]:
    """Returns the sha256 of every tensor's bytes, hashed in parallel."""
    with ThreadPoolExecutor(NUM_HASHERS) as pool:
        return dict(zip(tensors, pool.map(_hash_slice, tensors.values()), strict=True))


def write_tensors(
    directory: Path, tensors: Mapping[str, RawTensor], *, max_file_bytes: int
) -> list[Path]:
    """Writes `tensors` in name order as `model-00001-of-0000N.safetensors` files.

    A file ends before the tensor that would take it past `max_file_bytes`; a larger tensor gets
    a file of its own.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        size = len(tensors[name].payload)
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    directory.mkdir(parents=True, exist_ok=True)
    paths = [
        directory / f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        for index in range(1, len(groups) + 1)
    ]
    for path, names in zip(paths, groups, strict=True):
        _write_file(path, {name: tensors[name] for name in names})
    return paths


def write_index(directory: Path) -> Path:
    """Writes `model.safetensors.index.json`, which transformers wants beside several files."""
    tensors = read_headers(directory)
    index = {
        "metadata": {"total_size": sum(item.stop - item.start for item in tensors.values())},
        "weight_map": {name: item.path.name for name, item in tensors.items()},
    }
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=1))
    return path


def _parsed_header(path: Path, payload: bytes) -> dict[str, Any]:
    try:
        header = json.loads(payload)
    except ValueError as error:
        raise Corrupt(f"{path} is not a safetensors file: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise Corrupt(f"{path} is not a safetensors file: its header is not an object.")
    return cast("dict[str, Any]", header)


def _slice(path: Path, name: str, entry: Any, *, data_start: int) -> TensorSlice:
    try:
        first, last = entry["data_offsets"]
        return TensorSlice(
            name=name,
            dtype=str(entry["dtype"]),
            shape=tuple(int(size) for size in entry["shape"]),
            path=path,
            start=data_start + int(first),
            stop=data_start + int(last),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{path} describes tensor {name} wrongly: {entry!r}.") from error


def _hash_slice(tensor: TensorSlice) -> str:
    with mapped(tensor.path) as view:
        return hashlib.sha256(view[tensor.start : tensor.stop]).hexdigest()


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Yields the bytes of a file without copying them."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
        memoryview(pages) as view,
    ):
        yield view


def _write_file(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.payload)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.payload)
