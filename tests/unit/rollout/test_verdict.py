"""Tolerances and verdicts in numbers that a reader can check."""

from typing import Any

import pytest

from storage.experience import rows_to_table
from storage.schemas import SAMPLES
from tasks.rollout.compare import compare, is_equal, is_within, tolerance_of
from tasks.rollout.contract import Comparison
from tasks.rollout.verdict import Evidence, judge

ROW = {
    "sample_id": "g-0",
    "group_id": "g",
    "sample_index": 0,
    "prompt_token_ids": [1],
    "completion_token_ids": [5, 6, 7],
    "completion_mask": [True, True, False],
    "rollout_logprobs": [-1.0, -2.0, None],
    "finish_reason": "length",
    "stop_token_id": None,
    "seed": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_tokens": 3,
    "version_spans": [],
}


def compared(*found: dict[str, Any], stored: list[dict[str, Any]] | None = None) -> Comparison:
    tables = [rows_to_table(rows, schema=SAMPLES) for rows in (stored or [ROW], list(found))]
    return compare(*tables)


def test_figures_are_over_sampled_tokens() -> None:
    # |-1 + 1.5| = 0.5 and |-2 + 2| = 0: at most 0.5, 0.25 on average; the masked token has none.
    comparison = compared(ROW | {"rollout_logprobs": [-1.5, -2.0, None]})
    assert (comparison.max_abs_diff, comparison.mean_abs_diff) == (0.5, 0.25)
    assert comparison.where is not None
    assert (comparison.where.position, comparison.where.expected) == (0, "-1")


def test_a_logprob_where_none_was_sampled_is_another_value() -> None:
    comparison = compared(ROW | {"rollout_logprobs": [-1.0, -2.0, -3.0]})
    assert comparison.num_differing == 1
    assert comparison.where is not None
    assert (comparison.where.expected, comparison.where.found) == ("nothing", "-3")


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_logprob_that_is_no_number_is_another_value(logprob: float) -> None:
    comparison = compared(ROW | {"rollout_logprobs": [-1.0, logprob, None]})
    assert comparison.num_differing == 1
    assert not is_within(comparison, dtype="bfloat16", tolerance=1e9)


def test_a_shorter_completion_differs_where_it_ends() -> None:
    comparison = compared(ROW | {"completion_token_ids": [5, 6], "rollout_logprobs": [-1.0, -2.0]})
    assert comparison.where is not None
    assert comparison.where.position == 2
    assert (comparison.where.expected, comparison.where.found) == ("7", "nothing")


def test_a_missing_sample_is_named() -> None:
    comparison = compared(ROW, stored=[ROW, ROW | {"sample_id": "g-1"}])
    assert comparison.where is not None
    assert (comparison.where.expected, comparison.where.found) == ("g-1", "nothing")


def test_equal_rows_are_equal_to_the_bit_and_the_last_bit_counts() -> None:
    assert is_equal(compared(ROW))
    assert not is_equal(compared(ROW | {"rollout_logprobs": [-1.0000001, -2.0, None]}))


def figures(largest: float, mean: float, differing: int = 0) -> Comparison:
    where = compared(ROW | {"seed": 2}).where
    return Comparison(
        num_samples=4,
        num_tokens=9,
        num_differing=differing,
        max_abs_diff=largest,
        mean_abs_diff=mean,
        where=where,
    )


@pytest.mark.parametrize(
    ("dtype", "largest", "mean", "within"),
    [
        ("float32", 0.001, 0.001, True),
        ("float32", 0.0011, 0.0, False),
        ("bfloat16", 2.5, 0.25, True),
        ("bfloat16", 2.6, 0.01, False),
        ("bfloat16", 0.3, 0.26, False),
    ],
)
def test_float32_is_bounded_by_the_largest_and_bfloat16_by_the_mean_and_ten_times_it(
    dtype: str, largest: float, mean: float, within: bool
) -> None:
    tolerance = tolerance_of(dtype=dtype, float32=0.001, temperature=1.0)
    assert is_within(figures(largest, mean), dtype=dtype, tolerance=tolerance) is within


@pytest.mark.parametrize(("temperature", "allowed"), [(0.5, 0.002), (2.0, 0.001), (0.0, 0.001)])
def test_a_temperature_below_one_widens_the_tolerance_as_it_widens_logits(
    temperature: float, allowed: float
) -> None:
    assert tolerance_of(dtype="float32", float32=0.001, temperature=temperature) == allowed


SAME, CLOSE, FAR, OTHER = figures(0, 0), figures(0.0005, 0), figures(3, 1), figures(0, 0, 1)


@pytest.mark.parametrize(
    ("regenerated", "forced", "promised", "changes", "outcome"),
    [
        (SAME, None, True, [], "to the bit"),
        (SAME, None, True, ["code"], "to the bit"),
        (CLOSE, None, True, [], "within tolerance"),
        (CLOSE, None, True, ["code"], "within tolerance"),
        (OTHER, SAME, True, [], "differs"),
        (FAR, SAME, True, [], "differs"),
        (OTHER, SAME, False, [], "within tolerance"),
        (OTHER, CLOSE, True, ["code"], "within tolerance"),
        (OTHER, FAR, False, [], "differs"),
        (OTHER, FAR, True, ["code"], "not comparable"),
        (OTHER, OTHER, True, ["code"], "differs"),
        (OTHER, None, True, [], "differs"),
        (OTHER, None, False, [], "not checked"),
        (OTHER, None, True, ["code"], "not comparable"),
        (None, SAME, True, [], "within tolerance"),
        (None, FAR, True, [], "differs"),
        (None, FAR, True, ["code"], "not comparable"),
        (None, None, True, [], "not checked"),
    ],
)
def test_the_verdict_follows_from_tokens_environment_and_platform(
    regenerated: Comparison | None,
    forced: Comparison | None,
    promised: bool,
    changes: list[str],
    outcome: str,
) -> None:
    evidence = Evidence(
        regenerated=regenerated,
        forced=forced,
        not_forced="top_p 0.9",
        tolerance=0.001,
        dtype="float32",
        promised=promised,
        environment_changes=changes,
    )
    assert judge(evidence)[0] == outcome
