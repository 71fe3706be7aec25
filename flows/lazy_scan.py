"""A table that is opened when DuckDB scans it, seen by DuckDB as a pyarrow Dataset."""

import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from storage.errors import StorageError
from storage.shard_tables import ShardTable


class LazyDataset(ds.InMemoryDataset):  # pyright: ignore[reportUntypedBaseClass]
    """Has a schema at once and rows when they are asked for.

    DuckDB calls `scanner` of whatever is a Dataset, for every scan, with the columns and the
    filter that it pushed down. Not for other callers: the methods of the parent see no rows.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        open_table: Callable[[], pa.Table | ShardTable],
        failures: list[Exception],
    ) -> None:
        """Keeps errors of the store in `failures`: DuckDB passes on nothing but their text."""
        super().__init__(schema.empty_table())
        self._open_table = open_table
        self._failures = failures
        self._opened: pa.Table | ShardTable | None = None
        self._lock = threading.Lock()

    def scanner(
        self, columns: list[str] | None = None, filter: pc.Expression | None = None
    ) -> "OneScan":
        """Returns what DuckDB takes the rows from."""
        try:
            with self._lock:
                table = self._opened = self._opened or self._open_table()
        except StorageError as error:
            self._failures.append(error)
            raise
        if isinstance(table, ShardTable):
            reader = table.to_reader(columns=columns, filter=filter)
        else:
            reader = ds.dataset(table).scanner(columns=columns, filter=filter).to_reader()
        return OneScan(reader, self._failures)


class OneScan:
    """The part of a pyarrow Scanner that DuckDB uses."""

    def __init__(self, reader: pa.RecordBatchReader, failures: list[Exception]) -> None:
        self._reader = reader
        self._failures = failures

    def to_reader(self) -> pa.RecordBatchReader:
        """Returns the rows."""
        return pa.RecordBatchReader.from_batches(self._reader.schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._reader
        except StorageError as error:
            self._failures.append(error)
            raise
