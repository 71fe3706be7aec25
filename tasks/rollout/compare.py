"""Whether stored samples are what a policy says now: two tables of rows, compared.

Pure comparison; nothing here reads a store or runs a model.

`S` samples, `T` tokens of a completion.
"""

import math
from itertools import zip_longest
from typing import Any

import pyarrow as pa

from storage.schemas import SAMPLES
from tasks.rollout.contract import Comparison, Difference
from tasks.rollout.proof import BF16_TOLERANCE

BF16_LARGEST = 2.5
"""What one token may be off by: SmolLM2 with kernels for another processor showed 0.92, 0.05 on
average; of 64 tokens swapped at random the least was off by 5.4."""

LOGPROBS = "rollout_logprobs"

_ABSENT = "nothing"


def compare(stored: pa.Table, found: pa.Table) -> Comparison:
    """Compares stored samples with those found for them, row by row.

    A logprob that is missing or not finite on one side alone counts as another value.

    Args:
        stored: rows of a samples shard.
        found: what they should be, in the same order.
    """
    ids, found_ids = (table.column("sample_id").to_pylist() for table in (stored, found))
    num_tokens = sum(len(tokens) for tokens in stored.column("completion_token_ids").to_pylist())
    if ids != found_ids:
        return Comparison(
            num_samples=stored.num_rows,
            num_tokens=num_tokens,
            num_differing=sum(mine != theirs for mine, theirs in zip_longest(ids, found_ids)),
            max_abs_diff=None,
            mean_abs_diff=None,
            where=_first_other_id(ids, found_ids),
        )
    differing = _other_values(stored, found, ids)
    gaps = _logprob_gaps(stored, found, differing)
    largest, row, position = max(gaps, default=(None, 0, 0))
    where = differing[min(differing)] if differing else None
    if where is None and largest:
        where = _logprob_difference(stored, found, row, position)
    return Comparison(
        num_samples=stored.num_rows,
        num_tokens=num_tokens,
        num_differing=len(differing),
        max_abs_diff=largest,
        mean_abs_diff=sum(gap for gap, _, _ in gaps) / len(gaps) if gaps else None,
        where=where,
    )


def is_equal(comparison: Comparison) -> bool:
    """Tells whether all rows are equal to the bit."""
    return not comparison.num_differing and not comparison.max_abs_diff


def is_within(comparison: Comparison, *, dtype: str, tolerance: float) -> bool:
    """Tells whether only logprobs differ, and those by no more than rounding explains.

    Args:
        comparison: of stored samples with what was found for them.
        dtype: what the engine computed in.
        tolerance: see `tolerance_of`.
    """
    if comparison.num_differing:
        return False
    largest, mean = comparison.max_abs_diff or 0.0, comparison.mean_abs_diff or 0.0
    if dtype == "float32":
        return largest <= tolerance
    return mean <= tolerance and largest <= tolerance * BF16_LARGEST / BF16_TOLERANCE


def tolerance_of(*, dtype: str, float32: float, temperature: float) -> float:
    """Returns what logprobs may differ by: the maximum in float32, the mean in bfloat16.

    A temperature below 1 widens the rounding of the logits, and so the tolerance.

    Args:
        dtype: what the engine computes in.
        float32: the tolerance in float32 at temperature 1.
        temperature: of sampling; 0 counts as 1.
    """
    base = float32 if dtype == "float32" else BF16_TOLERANCE
    return base / min(temperature or 1.0, 1.0)


def _first_other_id(ids: list[str], found_ids: list[str]) -> Difference:
    mine, theirs = next(pair for pair in zip_longest(ids, found_ids) if pair[0] != pair[1])
    return Difference(
        sample_id=mine or theirs,
        column="sample_id",
        position=None,
        expected=mine or _ABSENT,
        found=theirs or _ABSENT,
    )


def _other_values(stored: pa.Table, found: pa.Table, ids: list[str]) -> dict[int, Difference]:
    """Returns by row the first value that differs, logprobs aside."""
    differing: dict[int, Difference] = {}
    for column in SAMPLES.names:
        if column == LOGPROBS or stored.column(column).equals(found.column(column)):
            continue
        mine_S, theirs_S = _values(stored, column), _values(found, column)
        for row, (mine, theirs) in enumerate(zip(mine_S, theirs_S, strict=True)):
            if mine != theirs and row not in differing:
                differing[row] = _difference(ids[row], column, mine, theirs)
    return differing


def _values(table: pa.Table, column: str) -> list[Any]:
    return table.column(column).to_pylist()


def _difference(sample_id: str, column: str, mine: Any, theirs: Any) -> Difference:
    if not isinstance(mine, list):
        return Difference(
            sample_id=sample_id,
            column=column,
            position=None,
            expected=str(mine),
            found=str(theirs),
        )
    pairs = enumerate(zip_longest(mine, theirs, fillvalue=_ABSENT))
    position, (one, other) = next(entry for entry in pairs if entry[1][0] != entry[1][1])
    return Difference(
        sample_id=sample_id,
        column=column,
        position=position,
        expected=str(one),
        found=str(other),
    )


def _logprob_gaps(
    stored: pa.Table, found: pa.Table, differing: dict[int, Difference]
) -> list[tuple[float, int, int]]:
    """Returns (|logprob difference|, row, position) of all rows that do not differ otherwise.

    Rows whose logprobs cannot be compared are added to `differing`.
    """
    gaps: list[tuple[float, int, int]] = []
    mine_S, theirs_S = _values(stored, LOGPROBS), _values(found, LOGPROBS)
    for row, (mine_T, theirs_T) in enumerate(zip(mine_S, theirs_S, strict=True)):
        if row in differing:
            continue
        gap_T = [_gap(mine, theirs) for mine, theirs in zip_longest(mine_T, theirs_T)]
        known = [(gap, row, at) for at, gap in enumerate(gap_T) if gap is not None]
        unequal = [at for gap, _, at in known if not math.isfinite(gap)]
        if unequal:
            differing[row] = _logprob_difference(stored, found, row, unequal[0])
        else:
            gaps += known
    return gaps


def _logprob_difference(stored: pa.Table, found: pa.Table, row: int, position: int) -> Difference:
    mine_T, theirs_T = (table.column(LOGPROBS)[row].as_py() for table in (stored, found))
    return Difference(
        sample_id=stored.column("sample_id")[row].as_py(),
        column=LOGPROBS,
        position=position,
        expected=_number(mine_T, position),
        found=_number(theirs_T, position),
    )


def _gap(mine: float | None, theirs: float | None) -> float | None:
    """Returns how far two logprobs are apart, NaN if only one is known, None if neither is."""
    if mine is None or theirs is None:
        return None if mine is theirs else math.nan
    return abs(mine - theirs)


def _number(logprob_T: list[float | None], position: int) -> str:
    logprob = logprob_T[position] if position < len(logprob_T) else None
    return _ABSENT if logprob is None else f"{logprob:.9g}"
