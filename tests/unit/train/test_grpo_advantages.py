"""Advantages and token weights by hand, and casebook family 3 as far as numpy goes."""

import numpy as np
import pytest
from pydantic import ValidationError

from tasks.train.algorithms import grpo
from tasks.train.algorithms.contract import GradedSample, Verdicts


def judge(rewards, *, group_ids=None, truncated=None, statuses=None, **options) -> Verdicts:
    samples = [
        GradedSample(
            sample_id=str(index),
            group_id=group_ids[index] if group_ids else "g",
            status=statuses[index] if statuses else "graded",
            reward=reward,
            truncated=bool(truncated and truncated[index]),
        )
        for index, reward in enumerate(rewards)
    ]
    return grpo.advantages(samples, config=grpo.Config(**options))


def values(judged: Verdicts) -> list[float | None]:
    return [verdict.advantage for verdict in judged.verdicts]


def step_loss(token_losses: list[list[float]], **options) -> float:
    """The loss of one update from each sample's per-token losses."""
    weights = grpo.sample_weights(
        [len(losses) for losses in token_losses], config=grpo.Config(**options)
    )
    return float(sum(w * sum(losses) for w, losses in zip(weights, token_losses, strict=True)))


def test_equal_rewards_give_zero_and_are_counted_a01():
    judged = judge([1, 1, 1, 1])
    assert values(judged) == [0, 0, 0, 0]
    assert judged.num_zero_std_groups == 1
    assert all(verdict.kept for verdict in judged.verdicts)


def test_group_of_one_is_dropped_with_a_reason_a03():
    (verdict,) = judge([0.7]).verdicts
    assert (verdict.advantage, verdict.kept, verdict.reason) == (None, False, "too_few_graded")


def test_standard_deviation_is_of_a_sample_a05():
    # mean 1/4; squares 9/16 + 3/16 = 3/4; / 3 = 1/4; root 1/2; 0.75 / 0.5 = 1.5
    np.testing.assert_allclose(values(judge([1, 0, 0, 0])), [1.5, -0.5, -0.5, -0.5], atol=1e-5)


def test_missing_reward_takes_no_part_in_the_baseline_a06():
    statuses = ["graded", "grader_timeout", "graded", "graded"]
    judged = judge([1, None, 0, 1], statuses=statuses)
    # over [1, 0, 1]: mean 2/3, std 0.57735; (1 - 2/3) / 0.57735 = 0.57735
    graded = [value for value in values(judged) if value is not None]
    np.testing.assert_allclose(graded, [0.57735, -1.154701, 0.57735], atol=1e-5)
    missing = judged.verdicts[1]
    assert (missing.advantage, missing.kept, missing.reason) == (None, False, "grader_timeout")


def test_one_graded_sample_is_too_few_whatever_the_group_size():
    judged = judge([1, None, None], statuses=["graded", "grader_error", "not_applicable"])
    reasons = [verdict.reason for verdict in judged.verdicts]
    assert reasons == ["too_few_graded", "grader_error", "not_applicable"]
    assert judged.num_zero_std_groups == 0


def test_group_scattered_over_a_batch_has_one_baseline_a30():
    judged = judge([1, 1, 5, 0, 0, 3], group_ids=["a", "a", "b", "a", "a", "b"])
    here = [value for index, value in enumerate(values(judged)) if index not in (2, 5)]
    np.testing.assert_allclose(here, [0.866025, 0.866025, -0.866025, -0.866025], atol=1e-5)


def test_same_prompt_drawn_twice_is_two_groups_a32():
    judged = judge([1, 0, 1, 1], group_ids=["draw-1", "draw-1", "draw-2", "draw-2"])
    np.testing.assert_allclose(values(judged), [0.707107, -0.707107, 0, 0], atol=1e-5)


def test_small_but_real_spread_survives_a34():
    judged = judge([1 + step * 1e-5 for step in range(4)])
    # std 1.290994e-5, plus eps 1e-6: 1.5e-5 / 1.390994e-5 = 1.078365
    expected = [-1.078365, -0.359455, 0.359455, 1.078365]
    np.testing.assert_allclose(values(judged), expected, atol=1e-5)


def test_without_scale_the_advantage_is_the_distance_from_the_mean():
    assert values(judge([1, 0, 0, 0], scale="none")) == [0.75, -0.25, -0.25, -0.25]


def test_masked_truncated_sample_counts_in_the_baseline_only():
    judged = judge([1, 0, 0, 0], truncated=[0, 0, 0, 1], mask_truncated=True)
    np.testing.assert_allclose(values(judged), [1.5, -0.5, -0.5, -0.5], atol=1e-5)
    assert [verdict.kept for verdict in judged.verdicts] == [True, True, True, False]
    assert judged.verdicts[3].reason == "truncated"


def test_truncated_sample_is_trained_unless_masked():
    assert all(verdict.kept for verdict in judge([1, 0], truncated=[1, 0]).verdicts)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # [1, 1] and [-1, -1, -1, -1]
        ({"normalisation": "grpo"}, 0.0),  # (1 + -1) / 2
        ({"normalisation": "dapo"}, -1 / 3),  # (2 - 4) / 6
        ({"normalisation": "dr_grpo", "max_completion_tokens": 8}, -0.125),  # (2 - 4) / (2 * 8)
    ],
)
def test_three_normalisations_are_three_numbers_a09(options, expected):
    assert step_loss([[1, 1], [-1, -1, -1, -1]], **options) == pytest.approx(expected)


def test_token_mean_is_over_the_whole_step_a11():
    # (2 * 1 + 6 * 2) / 8, not (1 + 2) / 2
    assert step_loss([[1.0] * 2, [2.0] * 6]) == pytest.approx(1.75)


def test_denominator_is_that_of_the_optimizer_step_a13():
    # Two micro-steps of ten tokens make one step; a generation batch of four does not matter.
    assert step_loss([[1.0] * 10, [1.0] * 10]) == pytest.approx(1.0)


def test_cut_off_samples_leave_numerator_and_denominator_a15():
    judged = judge([1, 0, 0], truncated=[0, 0, 1], mask_truncated=True)
    lengths = [4, 6, 10]
    kept = [[1.0] * n for n, verdict in zip(lengths, judged.verdicts, strict=True) if verdict.kept]
    assert step_loss(kept) == pytest.approx(1.0)
    assert step_loss([]) == 0.0


def test_completion_without_tokens_is_no_nan_and_counts_as_a_sample_a22():
    assert step_loss([[], [1.0] * 3]) == pytest.approx(1.0)
    assert step_loss([[], [1.0] * 3], normalisation="grpo") == pytest.approx(0.5)
    # It still counts in the baseline of its group: mean 0.5, std 0.707107.
    np.testing.assert_allclose(values(judge([0, 1])), [-0.707107, 0.707107], atol=1e-5)


def test_dr_grpo_without_a_length_is_refused():
    with pytest.raises(ValidationError, match="max_completion_tokens"):
        grpo.Config(normalisation="dr_grpo")
