"""Some columns of a stored shard, by ranges: what nobody asked for is not read.

Digests are not checked here, because they are over whole objects: `experience.read_shard` does.
"""

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import Corrupt
from storage.object_store import ObjectStore
from storage.records import ObjectRef

WHOLE_BYTES = 128 * 1024
"""A shard up to this size is fetched in one request: Parquet's footer alone asks for 64 KiB."""


def read_columns(store: ObjectStore, ref: ObjectRef, *, columns: Sequence[str]) -> pa.Table:
    """Returns the named columns of a shard, in that order.

    Raises:
        NotFound: the object is gone.
        Corrupt: it is no Parquet file, or lacks a column.
    """
    is_whole = ref.num_bytes <= WHOLE_BYTES
    source = pa.BufferReader(store.get(ref.key)) if is_whole else _ranges(store, ref)
    try:
        # Callers read several shards at once; pyarrow's threads within one would only wait.
        file = pq.ParquetFile(source, pre_buffer=not is_whole)
        table = file.read(columns=list(columns), use_threads=False)
    except pa.ArrowException as error:
        raise Corrupt(
            f"{ref.key} in {store.uri} cannot be read as Parquet: {error}. Restore it from a copy "
            "of the store; `rollbook verify` names everything that changed."
        ) from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise Corrupt(
            f"{ref.key} in {store.uri} has no column {', '.join(missing)}. Expected a shard of "
            f"this version, found columns {file.schema_arrow.names}."
        )
    return table.select(list(columns))


def _ranges(store: ObjectStore, ref: ObjectRef) -> pa.NativeFile:
    return pa.PythonFile(_StoredFile(store, ref), mode="r")


class _StoredFile(io.RawIOBase):
    """A stored object as the seekable file that pyarrow reads ranges of."""

    def __init__(self, store: ObjectStore, ref: ObjectRef) -> None:
        super().__init__()
        self._store = store
        self._ref = ref
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ref.num_bytes}
        self._position = start[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(self._ref.num_bytes - self._position, 0)
        length = rest if size < 0 else min(size, rest)
        found = self._store.get_range(self._ref.key, self._position, length) if length else b""
        self._position += len(found)
        return found
