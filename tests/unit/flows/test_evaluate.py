import math

import pytest

from flows.eval_records import mean_interval
from flows.planning import derived_seed


def test_interval_is_over_prompts_with_the_sample_deviation():
    # Mean 0.5; deviations 0.5 each; variance 4 * 0.25 / 3; half = 1.96 * sqrt(1/3) / 2.
    low, high = mean_interval([0.0, 1.0, 0.0, 1.0])
    half = 1.96 * math.sqrt(1 / 3) / 2
    assert (low, high) == (0.0, 1.0)  # 0.5 - 0.566 is cut at 0.
    wide_low, wide_high = mean_interval([0.0, 1.0] * 50)
    assert wide_low == pytest.approx(0.5 - 1.96 * math.sqrt(25 / 99) / 10)
    assert wide_high == pytest.approx(0.5 + 1.96 * math.sqrt(25 / 99) / 10)
    assert half > 0.5


def test_interval_of_equal_values_follows_the_rule_of_three():
    assert mean_interval([1.0] * 30) == (pytest.approx(0.9), 1.0)
    assert mean_interval([0.0] * 30) == (0.0, pytest.approx(0.1))


def test_interval_of_one_prompt_is_unknown():
    assert mean_interval([1.0]) == (None, None)
    assert mean_interval([]) == (None, None)


def test_derived_seeds_differ_by_purpose_and_leave_room_for_spacing():
    seeds = {derived_seed(seed, what, n) for seed in (0, 1) for what in "ab" for n in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**48 for seed in seeds)
    assert derived_seed(0, "rollout", 64) == derived_seed(0, "rollout", 64)
