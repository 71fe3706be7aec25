"""Whether an engine holds the policy that it must sample from: its probe against the learner's.

Pure comparison; nothing here runs a model.

`R` probe rows, `T` tokens of a row.
"""

from dataclasses import dataclass

from storage.records import PolicyRef, Probe, WeightProof
from tasks.errors import Permanent

BF16_TOLERANCE = 0.25
"""On the mean: in bfloat16 right weights are off by 0.1 on average, strangers by more than 1.

The maximum says little there: one unlikely token alone may be off by 0.6.
"""

BF16_NEXT_TOLERANCE = 0.5
"""On the logprob of the decoded token, which is a likely one."""


FLOAT32_NOISE = 1e-4
"""What two float32 engines may differ by under a policy of ordinary logits."""

SEPARATION = 10.0
"""A swap that moved the probe by this many times the difference is told apart beyond doubt."""


@dataclass(frozen=True)
class NextToken:
    """The token that the engine decoded after a probe row, and what it thought of the learner's.

    `learner_logprob` is the engine's logprob of the learner's token, None if that token is not
    even among the engine's best few.
    """

    token_id: int
    logprob: float
    learner_logprob: float | None
    num_cached_tokens: int


@dataclass(frozen=True)
class ProbeReading:
    """What an engine says of a probe: logprobs of every token but the first, and the next one."""

    logprobs_R_T: list[list[float]]
    next_R: list[NextToken]


UNPROVEN = "(refused)"
"""In place of a digest: weights that were loaded and not proven."""


@dataclass(frozen=True)
class Proven:
    """The policy that the engine loaded last, and its reading of the probe at the time."""

    policy_digest: str
    reading: ProbeReading


def tolerance_of(policy: PolicyRef, *, dtype: str, tolerance: float, moved: float | None) -> float:
    """Returns the difference that is allowed: of the maximum in float32, of the mean in bfloat16.

    Where both compute in float32: `tolerance`, but no more than a tenth of what the swap moved,
    down to ordinary noise. So a large update may differ by more (sharp policies amplify the last
    bits of their logits), and a small one is still told apart from half a swap.
    """
    if not _both_float32(policy, dtype):
        return BF16_TOLERANCE
    if moved is None:
        return tolerance
    return min(tolerance, max(moved / SEPARATION, FLOAT32_NOISE))


def _both_float32(policy: PolicyRef, dtype: str) -> bool:
    return dtype == "float32" and policy.dtype == "float32"


def prove(
    policy: PolicyRef,
    *,
    probe: Probe,
    reading: ProbeReading,
    previous: Proven | None,
    dtype: str,
    tolerance: float,
) -> WeightProof:
    """Compares the engine's reading with the learner's probe.

    `exact` is claimed where the previous version's reading lies outside the tolerance, so that
    the probe tells the two apart; otherwise `swap-only`, which demands that the reading moved.

    Args:
        policy: what the engine must hold.
        probe: the learner's logprobs under that policy.
        reading: the engine's, taken after the swap.
        previous: what was loaded before this one, if anything.
        dtype: what the engine computes in.
        tolerance: most |logprob difference| in float32; see `tolerance_of`.

    Raises:
        Permanent: the two disagree, a stale cache was read, or nothing was swapped.
    """
    moved = _moved(policy, probe, reading, previous=previous)
    allowed = tolerance_of(policy, dtype=dtype, tolerance=tolerance, moved=moved)
    exact = _both_float32(policy, dtype)
    found = _worst(probe, reading.logprobs_R_T)
    if not (found.difference if exact else found.mean) <= allowed:
        which = "" if exact else " on average"
        raise _refusal(policy, f"{found.text} Expected at most {allowed:g}{which}.")
    allowed_next = allowed if exact else BF16_NEXT_TOLERANCE
    for row, token in enumerate(reading.next_R):
        _check_next(policy, probe=probe, row=row, token=token, allowed=allowed_next)
    separated = exact and (moved is None or moved > allowed)
    return WeightProof(
        kind="exact" if separated else "swap-only",
        policy_version=policy.version,
        policy_digest=policy.digest,
        max_abs_diff=found.difference,
        mean_abs_diff=found.mean,
        tolerance=allowed,
        num_tokens=sum(len(row) for row in reading.logprobs_R_T) + len(reading.next_R),
    )


@dataclass(frozen=True)
class _Worst:
    """The largest difference from the learner, the mean one, and how to say so."""

    difference: float
    mean: float
    text: str


def _worst(probe: Probe, logprobs_R_T: list[list[float]]) -> _Worst:
    """Returns the largest difference; a NaN counts as the largest."""
    differences = [
        (abs(engine - learner), row, position)
        for row, (engine_T, learner_T) in enumerate(zip(logprobs_R_T, probe.logprobs, strict=True))
        for position, (engine, learner) in enumerate(
            zip(engine_T, _known(learner_T), strict=True), start=1
        )
    ]
    unequal = [entry for entry in differences if entry[0] != entry[0]]
    difference, row, position = (unequal or [max(differences)])[0]
    engine, learner = logprobs_R_T[row][position - 1], probe.logprobs[row][position]
    mean = sum(entry[0] for entry in differences) / len(differences)
    return _Worst(
        difference,
        mean,
        f"its logprobs differ from the learner's by up to {difference:.3g}, {mean:.3g} on average, "
        f"over {len(differences)} tokens (row {row}, token {position}: engine {engine:.6g}, "
        f"learner {learner:.6g}).",
    )


def _known(logprobs_T: list[float | None]) -> list[float]:
    """Returns the logprobs after the first; one that is missing there is NaN, which no one is."""
    return [float("nan") if value is None else value for value in logprobs_T[1:]]


def _check_next(
    policy: PolicyRef, *, probe: Probe, row: int, token: NextToken, allowed: float
) -> None:
    """Checks one decoded token; within the tolerance of a tie, either token is right."""
    expected, learner = probe.next_token_ids[row], probe.next_logprobs[row]
    if token.num_cached_tokens:
        raise _refusal(
            policy,
            f"decoding after probe row {row} read {token.num_cached_tokens} tokens from the "
            "prefix cache, which holds what the previous weights computed. Expected none.",
        )
    engine = token.logprob if token.token_id == expected else token.learner_logprob
    agrees = engine is not None and abs(engine - learner) <= allowed
    tied = engine is not None and token.logprob - engine <= 2 * allowed
    if not (agrees and tied):
        seen = "far below its best" if engine is None else f"at {engine:.6g}"
        raise _refusal(
            policy,
            f"after probe row {row} it decodes token {token.token_id} ({token.logprob:.6g}) and "
            f"sees the learner's token {expected} {seen}. Expected {learner:.6g} within "
            f"{allowed:g}.",
        )


def _moved(
    policy: PolicyRef, probe: Probe, reading: ProbeReading, *, previous: Proven | None
) -> float | None:
    """Returns how far the previous reading is from this probe, None if nothing had to move.

    Raises:
        Permanent: another policy, but the reading did not move by a bit.
    """
    if previous is None or previous.policy_digest == policy.digest:
        return None
    same = reading.logprobs_R_T == previous.reading.logprobs_R_T
    if same and previous.policy_digest != UNPROVEN:
        raise _refusal(
            policy,
            f"the probe reads bit for bit as it did under policy {previous.policy_digest[:12]}, "
            "so nothing was swapped. Expected another reading for another digest.",
        )
    return _worst(probe, previous.reading.logprobs_R_T).difference


def _refusal(policy: PolicyRef, what: str) -> Permanent:
    return Permanent(
        f"The engine does not hold policy {policy.version} ({policy.digest[:12]}): {what} It "
        "holds nothing now and will not sample. Start it again; if that fails too, the model's "
        "config does not describe these weights."
    )
