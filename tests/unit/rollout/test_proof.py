"""What counts as a proof that an engine holds a policy, in numbers that a reader can check."""

from dataclasses import replace

import pytest

from storage.records import ObjectRef, PolicyRef, Probe
from tasks.errors import Permanent
from tasks.rollout.proof import NextToken, ProbeReading, Proven, prove

PROBE = Probe(
    token_ids=[[5, 6, 7]],
    logprobs=[[None, -1.0, -2.0]],
    next_token_ids=[8],
    next_logprobs=[-0.5],
)
NEXT = NextToken(token_id=8, logprob=-0.5, learner_logprob=-0.5, num_cached_tokens=0)
RIGHT = ProbeReading([[-1.00001, -2.0]], [NEXT])
BEFORE = Proven("b" * 64, ProbeReading([[-1.5, -2.5]], [NEXT]))


def policy(dtype: str = "float32") -> PolicyRef:
    probe = ObjectRef(key="probe", sha256="0" * 64, num_bytes=1)
    return PolicyRef(version=2, digest="c" * 64, dtype=dtype, files=[], probe=probe)


def proof_of(
    reading: ProbeReading,
    *,
    previous: Proven | None = BEFORE,
    dtype: str = "float32",
    learner: str = "float32",
):
    return prove(
        policy(learner),
        probe=PROBE,
        reading=reading,
        previous=previous,
        dtype=dtype,
        tolerance=1e-4,
    )


def next_reading(**changes: object) -> ProbeReading:
    return ProbeReading(RIGHT.logprobs_R_T, [replace(NEXT, **changes)])


def test_agreement_in_float32_that_the_previous_version_lacks_is_exact() -> None:
    proof = proof_of(RIGHT)
    assert proof.kind == "exact"
    assert proof.max_abs_diff == pytest.approx(1e-5)
    assert (proof.tolerance, proof.num_tokens) == (1e-4, 3)


def test_a_difference_beyond_the_tolerance_is_refused_with_both_figures() -> None:
    with pytest.raises(
        Permanent, match=r"up to 0\.0002, .*row 0, token 2: engine -2\.0002, learner"
    ):
        proof_of(ProbeReading([[-1.0, -2.0002]], [NEXT]))


def test_the_tolerance_is_a_tenth_of_what_the_swap_moved() -> None:
    # The previous version read -2.005 where the learner says -2.0: moved 0.005, a tenth 0.0005.
    before = Proven("b" * 64, ProbeReading([[-1.0, -2.005]], [NEXT]))
    sharp = ProbeReading([[-1.0, -2.0004]], [NEXT])
    arguments = {"probe": PROBE, "previous": before, "dtype": "float32", "tolerance": 1e-3}
    proof = prove(policy("float32"), reading=sharp, **arguments)
    assert (proof.kind, proof.tolerance) == ("exact", pytest.approx(5e-4))
    half_swapped = ProbeReading([[-1.0, -2.0006]], [NEXT])
    with pytest.raises(Permanent, match=r"Expected at most 0\.0005"):
        prove(policy("float32"), reading=half_swapped, **arguments)


def test_a_tiny_update_is_held_to_ordinary_noise() -> None:
    before = Proven("b" * 64, ProbeReading([[-1.0, -2.0003]], [NEXT]))
    arguments = {"probe": PROBE, "previous": before, "dtype": "float32", "tolerance": 1e-3}
    proof = prove(policy("float32"), reading=RIGHT, **arguments)
    assert (proof.kind, proof.tolerance) == ("exact", 1e-4)


def test_a_nan_is_refused() -> None:
    with pytest.raises(Permanent, match=r"row 0, token 1: engine nan"):
        proof_of(ProbeReading([[float("nan"), -2.0]], [NEXT]))


def test_a_probe_that_cannot_tell_the_versions_apart_proves_only_the_swap() -> None:
    near = Proven("b" * 64, ProbeReading([[-1.00002, -2.0]], [NEXT]))
    assert proof_of(RIGHT, previous=near).kind == "swap-only"


def test_a_reading_equal_to_the_previous_versions_is_refused() -> None:
    with pytest.raises(Permanent, match="nothing was swapped"):
        proof_of(RIGHT, previous=Proven("b" * 64, RIGHT))


def test_the_same_policy_again_may_read_the_same() -> None:
    assert proof_of(RIGHT, previous=Proven("c" * 64, RIGHT)).kind == "exact"


@pytest.mark.parametrize(("dtype", "learner"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_bfloat16_on_either_side_is_swap_only_within_a_mean_of_a_quarter(
    dtype: str, learner: str
) -> None:
    loose = ProbeReading([[-1.4, -2.0]], [NEXT])
    proof = proof_of(loose, dtype=dtype, learner=learner)
    assert (proof.kind, proof.tolerance) == ("swap-only", 0.25)
    with pytest.raises(Permanent, match=r"Expected at most 0\.25 on average"):
        proof_of(ProbeReading([[-1.6, -2.0]], [NEXT]), dtype=dtype, learner=learner)


def test_another_next_token_is_right_only_in_a_tie() -> None:
    # The engine's best leads the learner's token by 0.00015, within twice the tolerance.
    tie = next_reading(token_id=9, logprob=-0.49990, learner_logprob=-0.50005)
    assert proof_of(tie).kind == "exact"
    # It leads by 0.0003: one of the two would have to be off by more than the tolerance.
    lead = next_reading(token_id=9, logprob=-0.49975, learner_logprob=-0.50005)
    with pytest.raises(Permanent, match="decodes token 9"):
        proof_of(lead)


def test_a_next_token_that_the_engine_hardly_knows_is_refused() -> None:
    with pytest.raises(Permanent, match="learner's token 8 far below its best"):
        proof_of(next_reading(token_id=9, logprob=-0.5, learner_logprob=None))


def test_the_right_next_token_with_another_logprob_is_refused() -> None:
    with pytest.raises(Permanent, match=r"Expected -0\.5 within 0\.0001"):
        proof_of(next_reading(logprob=-0.6, learner_logprob=-0.6))


def test_decoding_from_cached_tokens_is_refused() -> None:
    with pytest.raises(Permanent, match="read 32 tokens from the prefix cache"):
        proof_of(next_reading(num_cached_tokens=32))
