"""Data set `parquet`: a Parquet file, or a directory of them in name order."""

from collections.abc import Iterator
from pathlib import Path

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
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    rows = [row for file in files for row in _read_file(file, config=config)]
    if not rows:
        raise ValueError(f"{path} has no rows. Expected a Parquet file, or a directory of them.")
    return rows


def _read_file(path: Path, *, config: Config) -> Iterator[Row]:
    file = _open(path)
    names = file.schema_arrow.names
    missing = [name for name in config.wanted if name not in names]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]!r}. Found the columns {names}. Name yours with "
            "prompt_field, answer_field, id_field and extra_fields."
        )
    number = 0
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=config.wanted):
        for values in batch.to_pylist():
            number += 1
            yield config.to_row(values, where=f"{path} row {number}")


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"Data file {path} cannot be read as Parquet: {error}. Check `path`."
        ) from error
