"""The one boundary where errors of scoring functions become data, in workers and on threads."""

import math
from numbers import Real
from typing import Any, get_args

from rewards.contract import RewardInput, Score, Status


def failed(error: Exception, *, part: str, item: RewardInput) -> Score:
    """Returns what is stored of a sample whose reward `part` raised `error`."""
    cause = f"{type(error).__name__} on sample {item.sample_id!r}: {error}"
    return Score(None, "grader_error", f"reward {part!r} raised {cause}")


def sound(score: Score, *, part: str, item: RewardInput) -> Score:
    """Returns `score` if it may be stored, else that it may not."""
    try:
        return checked(score)
    except Exception as error:
        return failed(error, part=part, item=item)


def checked(score: Score) -> Score:
    """Returns `score` if it is one that may be stored: graded with a number, or failed with words.

    Raises:
        ValueError: it is not; the message says why.
    """
    if score.status not in get_args(Status):
        raise ValueError(f"a score has no status {score.status!r}")
    reason: Any = score.reason
    if not isinstance(reason, str | None):
        raise ValueError(f"a reason is text, got {reason!r}")
    if score.status == "graded":
        if not isinstance(score.value, Real) or not math.isfinite(score.value):
            raise ValueError(f"a graded score needs a finite value, got {score.value!r}")
        return Score(float(score.value), reason=reason)
    if score.value is not None or not score.reason:
        raise ValueError(
            f"a score that is {score.status} needs a reason and no value, got {score.value!r}"
        )
    return score
