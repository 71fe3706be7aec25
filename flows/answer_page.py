"""How an answer of `rollbook sql` is printed: a table for people, JSON or CSV for machines."""

import csv
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, TextIO

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.visible_text import visible, visible_line

SHOWN_ROWS = 100
SHOWN_RECORDS = 10
"""Rows that are shown one below the other, because their columns do not fit side by side."""
MAX_CELL = 60
MIN_TEXT = 16
"""Text columns shrink to this, numbers never."""
RECORD_LINES = 4
WIDE = 1000
"""Columns of what is no terminal: nobody reads it in lines of a screen."""

Row = dict[str, Any]


def print_answer(reader: pa.RecordBatchReader) -> None:
    """Prints the first rows as a table and counts them all; memory does not grow with them."""
    is_wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=WIDE if is_wide else None, highlight=False)
    rows: list[Row] = []
    total = 0
    for row in _rows(reader):
        total += 1
        if len(rows) < SHOWN_ROWS:
            rows.append(row)
    names = reader.schema.names
    if names == ["explain_key", "explain_value"]:
        for row in rows:
            console.print(visible(row["explain_value"]), markup=False, soft_wrap=True)
        return
    widths = _widths(reader.schema, rows, limit=console.width)
    if widths is not None:
        console.print(_table(reader.schema, rows, widths))
    else:
        rows = rows[:SHOWN_RECORDS]
        for number, row in enumerate(rows, start=1):
            console.print(Text(f"row {number}", style="bold cyan"))
            console.print(_record(row, width=console.width))
    console.print(Text(_count(len(rows), total), style="dim"))


def write_json(reader: pa.RecordBatchReader, stream: TextIO) -> None:
    """Writes all rows as one JSON list, a row a line; what is not finite is null."""
    stream.write("[")
    for number, row in enumerate(_rows(reader)):
        stream.write(",\n" if number else "\n")
        stream.write(json.dumps(_plain(row)))
    stream.write("\n]\n")


def write_csv(reader: pa.RecordBatchReader, stream: TextIO) -> None:
    """Writes all rows as CSV with a header; lists and maps as JSON, nulls as nothing."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(reader.schema.names)
    shown = visible if stream.isatty() else str
    for row in _rows(reader):
        cells = [_plain(value) for value in row.values()]
        writer.writerow([shown(_csv_cell(cell)) for cell in cells])


def print_views(columns: dict[str, list[str]], meanings: dict[str, str]) -> None:
    """Prints which views there are, what a row of each is, and their columns."""
    console = Console(highlight=False)
    for name, meaning in meanings.items():
        console.print(Text.assemble((name, "bold cyan"), f": {meaning}"))
        console.print(Text(", ".join(columns[name]), style="dim"))
        console.print()
    console.print(
        'Ask like "select step, avg(reward) from samples group by step order by step". '
        "text_of(run, token ids) decodes. flows/QUERIES.md has more.",
        markup=False,
    )


def _rows(reader: pa.RecordBatchReader) -> Iterator[Row]:
    for batch in reader:
        yield from batch.to_pylist(maps_as_pydicts="lossy")


def _count(shown: int, total: int) -> str:
    if shown == total:
        return f"{total:,} row{'' if total == 1 else 's'}"
    return f"the first {shown:,} of {total:,} rows; --csv or --json print them all"


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _widths(schema: pa.Schema, rows: Sequence[Row], *, limit: int) -> list[int] | None:
    """Returns how wide each column is within `limit`, or None if they do not fit beside others."""
    widths: list[int] = []
    least: list[int] = []
    for field in schema:
        cells = [Text(_cell(row[field.name])).cell_len for row in rows]
        natural = min(max(cells, default=0), MAX_CELL)
        header = Text(visible_line(field.name)).cell_len
        widths.append(max(natural, header))
        least.append(max(natural if _is_number(field.type) else min(natural, MIN_TEXT), header))
    room = limit - 2 * (len(widths) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda index: widths[index] - least[index])
        widths[widest] -= 1
    return widths


def _table(schema: pa.Schema, rows: Sequence[Row], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for field, width in zip(schema, widths, strict=True):
        justify = "right" if _is_number(field.type) else "left"
        table.add_column(Text(visible_line(field.name)), justify=justify, width=width, no_wrap=True)
    for row in rows:
        cells = zip(row.values(), widths, strict=True)
        table.add_row(*(_cut(value, width) for value, width in cells))
    return table


def _record(row: Row, *, width: int) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    names = [Text(visible_line(name), style="dim") for name in row]
    label = max(name.cell_len for name in names)
    grid.add_column(justify="right", width=label, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in zip(names, row.values(), strict=True):
        grid.add_row(name, _cut(value, RECORD_LINES * max(width - label - 4, MIN_TEXT)))
    return grid


def _cut(value: Any, width: int) -> Text:
    text = Text(_cell(value), style="dim" if value is None else "")
    text.truncate(width, overflow="ellipsis")
    return text


def _cell(value: Any) -> str:
    """Returns a value as it is shown in one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, list | dict):
        return visible_line(json.dumps(_short(value), ensure_ascii=False))
    return visible_line(str(value))


def _short(value: Any) -> Any:
    """Returns nested values with fewer digits, and no longer than a cell can show."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {str(name): _short(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value[: RECORD_LINES * WIDE]]
    return _plain(value)


def _plain(value: Any) -> Any:
    """Returns a value as JSON can say it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):
        return _plain(float(value))
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, str | int) else str(value)


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
