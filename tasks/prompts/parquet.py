"""Data set `parquet`: a Parquet file, or a directory of them in name order."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.prompts.rows import FieldNames, Row, Rows

BATCH_ROWS = 4096


class Config(FieldNames):
    """Where the files are."""

    path: Path
    held_out_path: Path | None = None
    """Further files with the rows to evaluate on; none: `held_out` rows are cut from `path`."""


def read(config: Config) -> Rows:
    """Returns the rows of the files, in order of file name and row.

    Raises:
        ValueError: a file is unreadable or empty, a column is missing, or a row is unusable.
    """
    held_out = config.held_out_path
    return Rows(
        train=_read_path(config.path, config=config),
        held_out=None if held_out is None else _read_path(held_out, config=config),
    )


def _read_path(path: Path, *, config: Config) -> list[Row]:
    hint = "Name yours with prompt_field, answer_field, id_field and extra_fields."
    return [
        config.to_row(values, where=where)
        for values, where in read_values(path, required=config.wanted, hint=hint)
    ]


def read_values(
    path: Path, *, required: Sequence[str], optional: Sequence[str] = (), hint: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the rows of a file, or of a directory's files in name order, and where each stands.

    Args:
        path: file or directory.
        required: columns to read.
        optional: columns to read where a file has them.
        hint: what to do about a missing column.

    Raises:
        ValueError: a file is unreadable, a column is missing, or there are no rows.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    found = False
    for file in files:
        for values in _read_file(file, required, optional, hint=hint):
            found = True
            yield values
    if not found:
        raise ValueError(f"{path} has no rows. Expected a Parquet file, or a directory of them.")


def _read_file(
    path: Path, required: Sequence[str], optional: Sequence[str], *, hint: str
) -> Iterator[tuple[dict[str, Any], str]]:
    file = _open(path)
    names = file.schema_arrow.names
    missing = [name for name in required if name not in names]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}. Found the columns {names}. {hint}")
    wanted = dict.fromkeys([*required, *(name for name in optional if name in names)])
    number = 0
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=list(wanted)):
        for values in _to_pylist(batch, where=f"{path} after row {number}"):
            number += 1
            yield values, f"{path} row {number}"


def _to_pylist(batch: pa.RecordBatch, *, where: str) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: a text is not UTF-8 ({error.reason}). Write the file again from whole texts."
        ) from error


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"Data file {path} cannot be read as Parquet: {error}. Check `path`."
        ) from error
