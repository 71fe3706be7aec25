"""Data set `jsonl`: one JSON object per line."""

import json
from pathlib import Path
from typing import Any

from tasks.prompts.rows import FieldNames, Row, Rows


class Config(FieldNames):
    """Where the lines are."""

    path: Path
    held_out_path: Path | None = None
    """Another file with the rows to evaluate on; none: `held_out` rows are cut from `path`."""


def read(config: Config) -> Rows:
    """Returns the rows of the file, in its order. Blank lines are skipped.

    Raises:
        ValueError: the file is unreadable or empty, or a row is unusable; names file and line.
    """
    held_out = config.held_out_path
    return Rows(
        train=_read_file(config.path, config=config),
        held_out=None if held_out is None else _read_file(held_out, config=config),
    )


def _read_file(path: Path, *, config: Config) -> list[Row]:
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"Data file {path} cannot be read: {error.strerror}. Expected a file with one JSON "
            "object per line; check `path`."
        ) from error
    rows: list[Row] = []
    # Not str.splitlines: it also splits at separators that JSON strings may hold.
    for number, line in enumerate(payload.split(b"\n"), start=1):
        if line.strip():
            where = f"{path} line {number}"
            rows.append(_to_row(line, config=config, where=where))
    if not rows:
        raise ValueError(f"Data file {path} has no rows. Expected one JSON object per line.")
    return rows


def _to_row(line: bytes, *, config: Config, where: str) -> Row:
    try:
        return config.to_row(_parse(line, where=where), where=where)
    except RecursionError as error:
        raise ValueError(
            f"{where} is nested too deeply to be read. Expected an object of texts, numbers and "
            "short lists."
        ) from error


def _parse(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{where} is not JSON: {error}. Expected one object per line, in UTF-8."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a JSON {type(value).__name__}. Expected an object per line.")
    return value
