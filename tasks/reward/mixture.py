"""How the parts of a sample become its reward: selection by domain, gates, sums.

Nothing is graded here, and nothing is forgotten: every part's value is stored beside the sum.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rewards.contract import Part, RewardInput, Score, Status
from tasks.reward.contract import RewardConfig, RewardPart

_REASON_CHARACTERS = 2000
"""Reasons may quote a completion, or a judge: they are cut to what a table can hold."""


@dataclass(frozen=True)
class _Verdict:
    """What of a sample counts: the numbers of its `counted` parts, or why it has no reward."""

    parts: tuple[Part, ...]
    counted: tuple[int, ...]
    status: Status
    reason: str | None


def left_out(part: RewardPart, item: RewardInput, *, column: str) -> Score | None:
    """Returns the score of a part that is not asked of this sample; None if it is to be graded.

    Args:
        part: perhaps for some domains only.
        item: the sample.
        column: what domains are values of: `domain`, or a key of the prompt's extra.
    """
    if not part.domains:
        return None
    found = item.domain if column == "domain" else item.extra.get(column)
    if found is None:
        return Score(None, "grader_error", f"the prompt's extra has no {column!r}")
    if str(found) in part.domains:
        return None
    return Score(None, "not_applicable", f"not for {column} {found}")


def closed_gate(config: RewardConfig, scores: Sequence[Score | None]) -> RewardPart | None:
    """Returns the first gate that keeps a sample from the other parts; None: it may pass.

    Args:
        config: names the gates.
        scores: one per part; None where it is not known yet.
    """
    for part, score in zip(config.parts, scores, strict=True):
        if part.gate and score is not None and score.value is not None and score.value < 1.0:
            return part
    return None


def combine(
    config: RewardConfig, scores: Sequence[Sequence[Score]], *, groups: Sequence[str]
) -> list[Score]:
    """Returns each sample's score, with its parts.

    `sum`: sum of value x weight over its parts. `normalised_sum`: each value is first replaced by
    its distance from the group's mean in units of the group's (sample) standard deviation, 0 where
    all are equal. A part that is `not_applicable` takes no part. The value is None unless every
    other part was graded (and there is one): a failure is not a zero. Status and reason are then
    those of the first part that failed. Samples without a reward count in no mean or deviation.
    Below a closed gate only the gate counts, whatever became of the other parts.

    Args:
        config: weights, gates and the way to combine.
        scores: of every sample, one per part of `config`.
        groups: the prompt group of every sample.
    """
    verdicts = [_verdict(config, parts) for parts in scores]
    if config.combine == "normalised_sum":
        values = _normalised(verdicts, groups)
    else:
        values = [[part.value for part in verdict.parts] for verdict in verdicts]
    return [
        _weighted(verdict, of_parts) for verdict, of_parts in zip(verdicts, values, strict=True)
    ]


def _weighted(verdict: _Verdict, values: Sequence[float | None]) -> Score:
    if verdict.status != "graded":
        return Score(None, verdict.status, verdict.reason, verdict.parts)
    terms = [(values[index], verdict.parts[index].weight) for index in verdict.counted]
    total = float(sum(value * weight for value, weight in terms if value is not None))
    if not math.isfinite(total):
        return Score(None, "grader_error", f"its parts add up to {total}", verdict.parts)
    return Score(total, "graded", verdict.reason, verdict.parts)


def _verdict(config: RewardConfig, scores: Sequence[Score]) -> _Verdict:
    parts = tuple(
        Part(part.stored_name, score.value, part.weight, score.status, _stored(score.reason))
        for part, score in zip(config.parts, scores, strict=True)
    )
    applied = [index for index, part in enumerate(parts) if part.status != "not_applicable"]
    gates = [index for index in applied if config.parts[index].gate]
    failed = _first_failed(parts, gates)
    gate = closed_gate(config, scores)
    if failed is None and gate is not None:
        index = config.parts.index(gate)
        reason = f"gate {gate.stored_name}: {parts[index].reason or 'closed'}"
        return _Verdict(parts, (index,), "graded", reason)
    failed = failed or _first_failed(parts, applied)
    if failed is not None:
        return _Verdict(parts, (), failed.status, failed.reason)
    if not applied:
        said = "; ".join(f"{part.name}: {part.reason}" for part in parts if part.reason)
        return _Verdict(parts, (), "not_applicable", f"no part applies to this sample: {said}")
    named = [parts[index] for index in applied]
    reasons = "; ".join(f"{part.name}: {part.reason}" for part in named if part.reason)
    return _Verdict(parts, tuple(applied), "graded", reasons or None)


def _first_failed(parts: Sequence[Part], indices: Iterable[int]) -> Part | None:
    return next((parts[index] for index in indices if parts[index].status != "graded"), None)


def _normalised(verdicts: Sequence[_Verdict], groups: Sequence[str]) -> list[list[float | None]]:
    """Returns the counted values, brought to mean 0 and deviation 1 in their group, else None."""
    values: list[list[float | None]] = [[None] * len(verdict.parts) for verdict in verdicts]
    members: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, (verdict, group) in enumerate(zip(verdicts, groups, strict=True)):
        for index in verdict.counted:
            members[group, index].append(row)
    for (_, index), rows in members.items():
        found = [verdicts[row].parts[index].value or 0.0 for row in rows]
        mean, deviation = _moments(found)
        for row, value in zip(rows, found, strict=True):
            values[row][index] = (value - mean) / deviation if deviation else 0.0
    return values


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and deviation, not a number where they are beyond what a float holds."""
    try:
        return fmean(values), stdev(values) if len(values) > 1 else 0.0
    except OverflowError:
        return math.nan, math.nan


GATE_CLOSED = "gate {} is closed"
"""Why a part behind a closed gate was not asked."""
_GATE_CLOSED = re.compile(r"gate .+ is closed")


def is_right(value: float | None, status: str, reason: str | None) -> bool | None:
    """Returns whether a part that counts as accuracy says right; None: it says nothing.

    Behind a closed gate an answer is wrong, whatever it is; of another domain it is neither.
    """
    if status == "graded":
        return value == 1.0
    behind_gate = status == "not_applicable" and _GATE_CLOSED.fullmatch(reason or "")
    return False if behind_gate else None


def _stored(reason: str | None) -> str | None:
    return None if reason is None else reason[:_REASON_CHARACTERS]
