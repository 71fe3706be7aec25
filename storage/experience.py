"""Shards of experience: declared schema in, the same bytes out, checked on the way back.

Knows nothing of what the columns mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import Corrupt
from storage.object_store import ObjectStore
from storage.objects import put_object, read_object
from storage.records import ObjectRef

ROW_GROUP_ROWS = 4096
"""Fixed, because it is part of the bytes."""

ZSTD_LEVEL = 1


def rows_to_table(rows: Sequence[Mapping[str, Any]], *, schema: pa.Schema) -> pa.Table:
    r"""Returns `rows` as a table of `schema`; text that UTF-8 cannot hold is escaped.

    A lone surrogate becomes its escape (`\ud800`); every other character, NUL included, stays.
    Token ids are never touched.
    """
    text = {field.name for field in schema if _holds_text(field)}
    clean = [
        {name: _encodable(value) if name in text else value for name, value in row.items()}
        for row in rows
    ]
    return pa.Table.from_pylist(clean, schema=schema)


def encode_shard(table: pa.Table, *, schema: pa.Schema) -> bytes:
    """Returns `table` as Parquet; the same rows give the same bytes in every process.

    Raises:
        ValueError: a column is missing, extra, of another type, or null where it must not be.
    """
    _check_columns(table.schema, schema)
    _check_nulls(table, schema)
    # Pages end where chunks end, so the chunking of the caller would show in the bytes.
    whole = pa.Table.from_arrays(table.combine_chunks().columns, schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(whole, sink, **_settings(schema))
    return sink.getvalue().to_pybytes()


def write_shard(store: ObjectStore, table: pa.Table, *, schema: pa.Schema, key: str) -> ObjectRef:
    """Writes `table` as one Parquet object; `rows` of the reference counts it (0 is fine).

    Raises:
        ValueError: `table` is not of `schema`.
    """
    return put_object(store, key, encode_shard(table, schema=schema), rows=table.num_rows)


def read_shard(
    store: ObjectStore, ref: ObjectRef, *, schema: pa.Schema, columns: list[str] | None = None
) -> pa.Table:
    """Returns the rows of a shard, all columns or those named.

    Raises:
        NotFound: the object is gone.
        Corrupt: other bytes than `ref` names, or a column of another type.
    """
    return decode_shard(read_object(store, ref), schema=schema, columns=columns, name=ref.key)


def decode_shard(
    payload: bytes, *, schema: pa.Schema, columns: list[str] | None = None, name: str = "shard"
) -> pa.Table:
    """Returns the rows of Parquet bytes; `name` is what errors call them.

    Raises:
        Corrupt: not Parquet, or not of `schema`; the message names the column.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(payload), page_checksum_verification=True)
    except pa.ArrowInvalid as error:
        raise Corrupt(f"{name} is not a Parquet file: {error}. Restore it from a copy.") from error
    try:
        _check_columns(file.schema_arrow, schema)
    except ValueError as error:
        raise Corrupt(f"{name}: {error}") from error
    return file.read(columns=columns, use_threads=True)


def _check_columns(found: pa.Schema, declared: pa.Schema) -> None:
    if found.names != declared.names:
        raise ValueError(
            f"Columns are {found.names}, expected {declared.names}. Build the table with "
            "`rows_to_table` or with `schema=`."
        )
    for name in declared.names:
        have, want = found.field(name).type, declared.field(name).type
        if have != want:
            raise ValueError(f"Column {name!r} is {have}, expected {want}. Declare the type.")


def _check_nulls(table: pa.Table, schema: pa.Schema) -> None:
    for field in schema:
        missing = table.column(field.name).null_count
        if missing and not field.nullable:
            raise ValueError(
                f"Column {field.name!r} has {missing} nulls in {table.num_rows} rows. Expected "
                "none: it must be known for every row."
            )


def _settings(schema: pa.Schema) -> dict[str, Any]:
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    return {
        "compression": "zstd",
        "compression_level": ZSTD_LEVEL,
        "use_dictionary": [path for path, kind in leaves if not pa.types.is_floating(kind)],
        "column_encoding": {
            path: "BYTE_STREAM_SPLIT" for path, kind in leaves if pa.types.is_floating(kind)
        },
        "row_group_size": ROW_GROUP_ROWS,
        "store_schema": False,
        "write_page_checksum": True,
        "version": "2.6",
        "data_page_version": "1.0",
    }


def _leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yields the Parquet paths of a column with what they hold."""
    if isinstance(kind, pa.ListType):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif isinstance(kind, pa.StructType):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    else:
        yield path, kind


def _holds_text(field: pa.Field) -> bool:
    return any(pa.types.is_string(kind) for _, kind in _leaves(field.name, field.type))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {name: _encodable(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_encodable(item) for item in value]
    return value
