"""Two tables that must be one: which rows differ, and where the first of them does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pyarrow as pa

Row = Mapping[str, Any]
MAX_SHOWN = 80


@dataclass(frozen=True)
class OtherRow:
    """One row that is not what it must be: its number, and the columns that differ."""

    row: int
    stored: Row | None
    again: Row | None
    columns: list[str]

    @property
    def expected(self) -> str:
        """What it must be, as far as it differs."""
        return _said(self.again, self.row, self.columns)

    @property
    def found(self) -> str:
        """What is stored instead."""
        return _said(self.stored, self.row, self.columns)


def other_rows(
    stored: pa.Table,
    again: pa.Table,
    *,
    is_same: Callable[[str, Any, Any], bool] = lambda column, stored, again: stored == again,
) -> list[OtherRow]:
    """Returns the rows in which `stored` is not what `again` says, in order.

    Args:
        stored: what the store holds.
        again: what it must hold: the same columns.
        is_same: compares two values of a column.
    """
    if stored.equals(again):
        return []
    pairs = zip_longest(stored.to_pylist(), again.to_pylist())
    found: list[OtherRow] = []
    for number, (row, expected) in enumerate(pairs):
        columns = _other_columns(row, expected, again.column_names, is_same)
        if columns:
            found.append(OtherRow(number, row, expected, columns))
    return found


def _other_columns(
    row: Row | None,
    expected: Row | None,
    columns: Sequence[str],
    is_same: Callable[[str, Any, Any], bool],
) -> list[str]:
    if row is None or expected is None:
        return list(columns[:1])
    return [name for name in columns if not is_same(name, row[name], expected[name])]


def _said(row: Row | None, number: int, columns: Sequence[str]) -> str:
    if row is None:
        return f"no row {number}"
    values = ", ".join(f"{name} {_cut(row[name])}" for name in columns)
    return f"row {number}: {values}"


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
