"""The clipped objective by hand; loss and gradient come from torch, in both float types."""

import math

import numpy as np
import pytest

BOTH = pytest.mark.parametrize("dtype", ["float32", "float64"])


def told(lab, policy, *, dtype="float64", options=None, **terms):
    count = len(policy)
    defaults = {
        "policy": policy,
        "old": policy,
        "rollout": terms.get("old", policy),
        "advantages": [1.0] * count,
        "weights": [1.0 / count] * count,
        "mask": [True] * count,
        "sample_index": [0] * count,
    }
    return lab("loss", "grpo", options or {}, dtype, {**defaults, **terms})


@BOTH
def test_clipping_bounds_gains_but_not_losses(lab, dtype):
    # ratios 1.5 and 0.5, advantages +1 and -1, clip 0.2: min(1.5, 1.2) = 1.2,
    # min(-0.5, -0.8) = -0.8; loss -(1.2 - 0.8) / 2 = -0.2
    said = told(
        lab, [math.log(1.5), math.log(0.5)], old=[0.0, 0.0], advantages=[1, -1], dtype=dtype
    )
    assert said["loss"] == pytest.approx(-0.2, abs=1e-6)
    assert said["gradient"] == [0.0, 0.0]
    assert said["clipped"] == [True, True]


@BOTH
def test_clipped_objective_of_one_token_a20(lab, dtype):
    up = told(lab, [-0.9], old=[-1.2], advantages=[1.0], dtype=dtype)
    assert (up["loss"], up["gradient"][0]) == (pytest.approx(-1.2, abs=1e-5), 0.0)
    down = told(lab, [-0.9], old=[-1.2], advantages=[-1.0], dtype=dtype)
    # ratio e^0.3 = 1.349859, not clipped because a larger one is worse
    assert down["loss"] == pytest.approx(1.349859, abs=1e-5)
    assert down["gradient"][0] == pytest.approx(1.349859, abs=1e-5)


def test_clip_bounds_are_separate(lab):
    options = {"clip_low": 0.1, "clip_high": 0.3}
    said = told(
        lab,
        [math.log(1.5), math.log(0.5)],
        old=[0.0, 0.0],
        advantages=[1, -1],
        options=options,
    )
    # -(1.3 - 0.9) / 2
    assert said["loss"] == pytest.approx(-0.2)
    assert said["per_token"] == pytest.approx([-0.65, 0.45])


def test_zero_advantage_gives_zero_loss_and_gradient_a01(lab):
    said = told(lab, [-1.0, -2.0], old=[-1.5, -1.0], advantages=[0.0, 0.0])
    assert said["loss"] == 0.0
    assert said["gradient"] == [0.0, 0.0]


def test_one_update_takes_the_policy_itself_as_old(lab):
    # ratio 1 everywhere: loss is minus the mean advantage, the gradient minus A / n
    said = told(lab, [-1.0, -2.0], old=None, rollout=[-1.0, -2.0], advantages=[1.0, -3.0])
    assert said["loss"] == pytest.approx(1.0)
    assert said["gradient"] == pytest.approx([-0.5, 1.5])


def test_importance_weight_is_capped_and_carries_no_gradient(lab):
    # old - rollout: ln 4 -> capped at 2; ln 0.5 -> 0.5
    old = [-1.0, -1.0]
    rollout = [-1.0 - math.log(4), -1.0 - math.log(0.5)]
    said = told(lab, old, old=None, rollout=rollout)
    assert said["loss"] == pytest.approx(-(2 + 0.5) / 2)
    assert said["gradient"] == pytest.approx([-1.0, -0.25])


def test_logprobs_stay_float32_a28(lab):
    # In bf16 both are -12.3125 and the ratio is 1. rollout = old, so w = 1.
    said = told(lab, [-12.34], old=[-12.3], advantages=[-1.0], dtype="float32")
    assert said["loss"] == pytest.approx(0.960789, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ("token", [1.105171, 0.818731, 1.221403, 1.0]),
        ("sequence_mean", [1.025315] * 4),  # exp((0.1 - 0.2 + 0.2 + 0) / 4)
        ("sequence_sum", [1.105171] * 4),  # exp(0.1)
    ],
)
def test_ratio_of_tokens_or_of_the_sequence_a40(lab, ratio, expected):
    # Advantage -1 and no lower clip in reach: the loss of a token is its ratio.
    said = told(
        lab,
        [-1.0, -2.0, -0.5, -1.5],
        old=[-1.1, -1.8, -0.7, -1.5],
        advantages=[-1.0] * 4,
        weights=[1.0] * 4,
        options={"ratio": ratio, "clip_low": 0.5},
    )
    np.testing.assert_allclose(said["per_token"], expected, atol=1e-5)


def test_sequence_ratio_ignores_masked_tokens(lab):
    # exp((0.1 - 0.2) / 2), the third token plays no part
    said = told(
        lab,
        [-1.0, -2.0, 9.0],
        old=[-1.1, -1.8, 0.0],
        advantages=[-1.0] * 3,
        weights=[1.0] * 3,
        mask=[True, True, False],
        options={"ratio": "sequence_mean"},
    )
    assert said["per_token"] == pytest.approx([math.exp(-0.05)] * 2 + [0.0])


def test_masked_token_may_hold_anything(lab):
    said = told(
        lab,
        [-1.0, -2.0],
        old=[-1.0, math.nan],
        rollout=[-1.0, math.inf],
        mask=[True, False],
    )
    assert said["loss"] == pytest.approx(-0.5)
    assert said["gradient"] == [-0.5, 0.0]
