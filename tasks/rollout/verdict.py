"""What a replay's comparisons mean: held, held within tolerance, broken, or nothing that counts.

Pure judgement; nothing here reads a store or runs a model.
"""

from dataclasses import dataclass

from tasks.rollout.compare import is_equal, is_within
from tasks.rollout.contract import Comparison, Difference, ReplayOutcome


@dataclass(frozen=True)
class Evidence:
    """What a replay found, before it is judged."""

    regenerated: Comparison | None
    forced: Comparison | None
    not_forced: str | None
    """Why there is no `forced`, if it was called for."""
    tolerance: float
    dtype: str
    promised: bool
    """Whether the platform of the record promises the same tokens again."""
    environment_changes: list[str]


def judge(evidence: Evidence) -> tuple[ReplayOutcome, str]:
    """Returns the outcome, and in words its figures or place.

    Other tokens under the recorded environment are a break where the platform promises the same
    ones. Elsewhere the stored tokens may be what another machine sampled: then the policy's own
    logprobs of them decide.
    """
    again, forced = evidence.regenerated, evidence.forced
    if again is not None and is_equal(again):
        return "to the bit", _counts(again)
    if again is not None and _is_within(again, evidence):
        return "within tolerance", f"{_counts(again)}: {_figures(again, evidence)}"
    same_environment = not evidence.environment_changes
    if again is not None and same_environment and evidence.promised:
        return "differs", f"sampled again, {_place(again)}{_plausible(evidence)}"
    if forced is None:
        return _unforced(evidence)
    if _is_within(forced, evidence):
        return (
            "within tolerance",
            f"teacher-forced, {_counts(forced)}: {_figures(forced, evidence)}",
        )
    if same_environment or forced.num_differing:
        return "differs", f"teacher-forced, {_place(forced)}; {_figures(forced, evidence)}"
    return "not comparable", f"another environment, and teacher-forced, {_place(forced)}"


def _unforced(evidence: Evidence) -> tuple[ReplayOutcome, str]:
    again = evidence.regenerated
    if again is not None and evidence.environment_changes:
        return "not comparable", f"another environment, and {_place(again)}"
    return "not checked", evidence.not_forced or "no comparison was made"


def _plausible(evidence: Evidence) -> str:
    if evidence.forced is None or not _is_within(evidence.forced, evidence):
        return ""
    return "; teacher-forced all are within tolerance, so the policy may well have sampled them"


def _is_within(comparison: Comparison, evidence: Evidence) -> bool:
    return is_within(comparison, dtype=evidence.dtype, tolerance=evidence.tolerance)


def _counts(comparison: Comparison) -> str:
    return f"{comparison.num_samples} samples, {comparison.num_tokens} tokens"


def _figures(comparison: Comparison, evidence: Evidence) -> str:
    which = "" if evidence.dtype == "float32" else " on average"
    return (
        f"logprobs differ by at most {comparison.max_abs_diff or 0:.3g}, "
        f"{comparison.mean_abs_diff or 0:.3g} on average (allowed: {evidence.tolerance:.3g}{which})"
    )


def _place(comparison: Comparison) -> str:
    where = comparison.where
    assert where is not None, "what differs differs somewhere"
    others = f" ({comparison.num_differing} of {comparison.num_samples} samples differ)"
    return spelled(where) + (others if comparison.num_differing else "")


def spelled(where: Difference) -> str:
    """Returns a difference in words: where, what was expected, what was found."""
    position = "" if where.position is None else f"[{where.position}]"
    return (
        f"sample {where.sample_id}, {where.column}{position}: expected {where.expected}, found "
        f"{where.found}"
    )
