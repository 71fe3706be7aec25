"""One table over the shards of many steps: joined, pruned and read only when it is asked.

Knows neither keys nor commits (`tables` does), and checks no digests (`column_reads` says why).
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as fs

from storage.column_reads import read_columns
from storage.ledger import read_record
from storage.object_store import ObjectStore
from storage.records import ObjectRef, RecordRef

READERS = 4
"""Units read at once; so many are in memory, with the asked columns only."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Shard:
    """One shard: itself, or the record whose output of that name it is, read when needed."""

    index: int
    where: ObjectRef | RecordRef
    output: str = ""


@dataclass(frozen=True)
class Unit:
    """Rows that share the values of `keys` (run and step): the shards of each source."""

    keys: Mapping[str, Any]
    shards: Mapping[str, Sequence[Shard]]


@dataclass(frozen=True)
class Source:
    """Shards of one kind that take part in a table.

    `columns` are {column of the shard: name in the table}. `join` is the column that finds the row
    of the first source; `one_to_one`: it has exactly one row for each of those.
    """

    name: str
    columns: Mapping[str, str]
    join: str = ""
    one_to_one: bool = False


@dataclass(frozen=True)
class ShardTable:
    """Rows of the first source with what the other sources say of them.

    `schema` starts with the keys; a column `shard`, if it has one, counts the first source's
    shards. Nothing is kept between calls but which object a record names.
    """

    store: ObjectStore
    schema: pa.Schema
    sources: Sequence[Source]
    units: Sequence[Unit]
    _refs: dict[str, ObjectRef] = field(default_factory=dict[str, ObjectRef])

    def to_table(
        self, *, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.Table:
        """Returns the rows that `filter` holds for: all columns or those named."""
        return self.to_reader(columns=columns, filter=filter).read_all()

    def to_reader(
        self, *, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.RecordBatchReader:
        """Yields what `to_table` returns, unit by unit, in their order.

        Units that `filter` leaves out by their keys are not opened, and of the others only the
        columns that are named or filtered by.

        Raises:
            NotFound: a shard is gone.
            Corrupt: a record is not what the commit names, or a shard is no Parquet file.
        """
        chosen = list(self.schema.names if columns is None else columns)
        schema = pa.schema([self.schema.field(name) for name in chosen])
        return pa.RecordBatchReader.from_batches(schema, self._batches(chosen, filter))

    def _batches(
        self, columns: list[str], condition: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        wanted = [*columns, *(name for name in self._mentioned(condition) if name not in columns)]
        for table in _in_order(lambda unit: self._read(unit, wanted), self._chosen(condition)):
            rows = table if condition is None else table.filter(condition)
            yield from rows.select(columns).to_batches()

    def _mentioned(self, condition: pc.Expression | None) -> list[str]:
        # pyarrow does not tell which columns an expression reads, but it prints them.
        words = set(re.findall(r"\w+", str(condition))) if condition is not None else set[str]()
        return [name for name in self.schema.names if name in words]

    def _chosen(self, condition: pc.Expression | None) -> list[Unit]:
        if condition is None:
            return list(self.units)
        kept = self._index.get_fragments(filter=condition)
        return [self.units[int(fragment.path)] for fragment in kept]

    @cached_property
    def _index(self) -> ds.FileSystemDataset:
        """A dataset whose files are never read: pyarrow leaves out units by it."""
        kind, files = ds.ParquetFileFormat(), fs.LocalFileSystem()
        fragments = [
            kind.make_fragment(str(number), files, partition_expression=_holds(unit.keys))
            for number, unit in enumerate(self.units)
        ]
        return ds.FileSystemDataset(fragments, self.schema, kind, files)

    def _read(self, unit: Unit, names: Sequence[str]) -> pa.Table:
        wanted = {
            source.name: [column for column, name in source.columns.items() if name in names]
            for source in self.sources
        }
        wanted = {name: columns for name, columns in wanted.items() if columns}
        base, *joined = self.sources
        alone = [source for source in joined if source.one_to_one and [source.name] == [*wanted]]
        if alone and "shard" not in names and unit.shards.get(alone[0].name):
            base, joined = alone[0], []
        joined = [source for source in joined if source.name in wanted]
        joins = {source.join for source in joined}
        rows = self._source_rows(unit, base, [*wanted.get(base.name, []), *joins])
        columns = {base.columns.get(name, name): rows[name] for name in rows.column_names}
        for source in joined:
            found = self._source_rows(unit, source, [*wanted[source.name], source.join])
            matched = _matched(rows[source.join], found, key=source.join)
            columns |= {source.columns[name]: matched[name] for name in wanted[source.name]}
        for name, value in unit.keys.items():
            columns[name] = pa.repeat(pa.scalar(value, self.schema.field(name).type), len(rows))
        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.table({name: columns[name] for name in names}, schema=schema)

    def _source_rows(self, unit: Unit, source: Source, columns: Sequence[str]) -> pa.Table:
        """Returns columns of all shards of a source, one after the other, with their number."""
        columns = list(dict.fromkeys(columns))
        tables = [self._shard_rows(shard, columns) for shard in unit.shards.get(source.name, [])]
        if tables:
            return pa.concat_tables(tables)
        types = {name: self.schema.field(source.columns.get(name, name)).type for name in columns}
        return pa.schema([("shard", pa.int32()), *types.items()]).empty_table()

    def _shard_rows(self, shard: Shard, columns: Sequence[str]) -> pa.Table:
        ref = self._ref(shard)
        found = read_columns(self.store, ref, columns=columns) if columns else None
        num_rows = found.num_rows if found is not None else ref.rows or 0
        numbers = pa.repeat(pa.scalar(shard.index, pa.int32()), num_rows)
        arrays = dict(zip(found.column_names, found.columns, strict=True)) if found else {}
        return pa.table({"shard": numbers, **arrays})

    def _ref(self, shard: Shard) -> ObjectRef:
        if isinstance(shard.where, ObjectRef):
            return shard.where
        key = shard.where.key
        if key not in self._refs:
            self._refs[key] = read_record(self.store, shard.where).outputs[shard.output]
        return self._refs[key]


def _holds(keys: Mapping[str, Any]) -> pc.Expression:
    first, *others = [pc.field(name) == pc.scalar(value) for name, value in keys.items()]
    for other in others:
        first &= other
    return first


def _matched(keys: pa.ChunkedArray, found: pa.Table, *, key: str) -> pa.Table:
    """Returns the row of `found` for every key, nulls where there is none."""
    if found[key].equals(keys):
        return found
    where = pc.SetLookupOptions(value_set=found[key].combine_chunks())
    return found.take(pc.call_function("index_in", [keys.combine_chunks()], where))


def _in_order(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Yields the results in the order of `items`, a few of them computed ahead."""
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(READERS, thread_name_prefix="shards") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
