"""How parts become a reward, worked out by hand."""

import pytest

from rewards.contract import RewardInput, Score
from tasks.reward.attribution import checked
from tasks.reward.contract import RewardConfig, RewardPart
from tasks.reward.mixture import combine, is_right, left_out

ERROR = Score(None, "grader_error", "broken")
TIMEOUT = Score(None, "grader_timeout", "slow")
ELSEWHERE = Score(None, "not_applicable", "not for domain b")

EXACT_AND_FORMAT = RewardConfig(
    parts=[RewardPart(kind="exact"), RewardPart(kind="format", weight=0.2)]
)
FORMAT_FIRST = RewardConfig(
    parts=[
        RewardPart(kind="format", weight=0.1, gate=True),
        RewardPart(kind="exact"),
    ]
)


@pytest.mark.parametrize(
    ("scores", "value", "status"),
    [
        # 1 x 1 + 0.2 x 0.5 = 1.1
        ((Score(1.0), Score(0.5)), 1.1, "graded"),
        ((Score(1.0), ELSEWHERE), 1.0, "graded"),
        ((Score(1.0), TIMEOUT), None, "grader_timeout"),
        ((ELSEWHERE, ELSEWHERE), None, "not_applicable"),
    ],
)
def test_reward_is_null_unless_every_part_that_applies_was_graded(
    scores: tuple[Score, Score], value: float | None, status: str
) -> None:
    (total,) = combine(EXACT_AND_FORMAT, [scores], groups=["g"])
    assert total.value == (pytest.approx(value) if value is not None else None)
    assert total.status == status
    assert [part.name for part in total.parts] == ["exact", "format"]


@pytest.mark.parametrize(
    ("scores", "value", "reason"),
    [
        # 0.1 x 1 + 1 x 1 = 1.1: the gate is open.
        ((Score(1.0), Score(1.0)), 1.1, None),
        # The gate is closed: 0.1 x 0 alone, whatever the answer is, or if it could be graded.
        ((Score(0.0, reason="wrong_format"), Score(1.0)), 0.0, "gate format: wrong_format"),
        ((Score(0.5), Score(1.0)), 0.05, "gate format: closed"),
        ((Score(0.0, reason="wrong_format"), ERROR), 0.0, "gate format: wrong_format"),
    ],
)
def test_a_closed_gate_alone_decides(
    scores: tuple[Score, Score], value: float, reason: str | None
) -> None:
    (total,) = combine(FORMAT_FIRST, [scores], groups=["g"])
    assert total.value == pytest.approx(value)
    assert total.reason == reason
    assert [part.value for part in total.parts] == [score.value for score in scores]


def test_a_gate_that_failed_is_no_closed_gate() -> None:
    (total,) = combine(FORMAT_FIRST, [(TIMEOUT, Score(1.0))], groups=["g"])
    assert (total.value, total.status, total.reason) == (None, "grader_timeout", "slow")


def test_normalised_parts_weigh_alike_whatever_their_scale() -> None:
    config = EXACT_AND_FORMAT.model_copy(update={"combine": "normalised_sum"})
    scores = [(Score(1.0), Score(300.0)), (Score(0.0), Score(100.0)), (Score(0.0), Score(200.0))]
    totals = combine(config, scores, groups=["g"] * 3)
    # exact 1, 0, 0: mean 1/3, deviation sqrt(1/3) = 0.577: 1.155, -0.577, -0.577.
    # format 300, 100, 200: mean 200, deviation 100: 1, -1, 0; times 0.2.
    assert [total.value for total in totals] == pytest.approx([1.3547, -0.7774, -0.5774], abs=1e-4)
    assert [part.value for part in totals[0].parts] == [1.0, 300.0]


def test_normalising_keeps_groups_apart_and_leaves_out_who_has_no_reward() -> None:
    config = EXACT_AND_FORMAT.model_copy(update={"combine": "normalised_sum"})
    whole = Score(0.0)
    scores = [(Score(1.0), whole), (ERROR, whole), (Score(0.0), whole), (Score(1.0), whole)]
    totals = combine(config, [*scores, (Score(5.0), Score(7.0))], groups=["g"] * 4 + ["h"])
    # 1, -, 0, 1: mean 2/3, deviation 0.577: 0.577, -, -1.155, 0.577. A group of one has no spread.
    assert totals[1].value is None
    graded = [total.value for total in totals if total.value is not None]
    assert graded == pytest.approx([0.5774, -1.1547, 0.5774, 0.0], abs=1e-4)


def test_below_a_gate_the_other_parts_leave_the_groups_mean_alone() -> None:
    config = FORMAT_FIRST.model_copy(update={"combine": "normalised_sum"})
    scores = [(Score(1.0), Score(1.0)), (Score(1.0), Score(0.0)), (Score(0.0), Score(1.0))]
    totals = combine(config, scores, groups=["g"] * 3)
    # format 1, 1, 0: 0.577, 0.577, -1.155, times 0.1. exact of the first two: 0.707, -0.707.
    assert [total.value for total in totals] == pytest.approx([0.7648, -0.6494, -0.1155], abs=1e-4)


def test_domains_are_the_data_sets_name_or_a_column() -> None:
    math = RewardPart(kind="math", domains=["algebra", "3"])
    item = RewardInput("", domain="algebra", extra={"level": 3, "source": "web"})
    assert left_out(RewardPart(kind="math"), item, column="domain") is None
    assert left_out(math, item, column="domain") is None
    assert left_out(math, item, column="level") is None
    assert left_out(math, item, column="source") == Score(
        None, "not_applicable", "not for source web"
    )


def test_a_row_without_the_domain_column_is_an_error_of_the_data() -> None:
    found = left_out(
        RewardPart(kind="math", domains=["a"]), RewardInput("", domain="a"), column="data_source"
    )
    assert found == Score(None, "grader_error", "the prompt's extra has no 'data_source'")


def test_long_reasons_are_cut_to_what_a_table_holds() -> None:
    (total,) = combine(EXACT_AND_FORMAT, [(Score(0.0, reason="x" * 9000), Score(1.0))], groups=[""])
    assert len(total.parts[0].reason or "") == 2000


@pytest.mark.parametrize("way", ["sum", "normalised_sum"])
def test_a_sum_beyond_all_numbers_is_an_error_and_no_reward(way: str) -> None:
    parts = [RewardPart(kind="exact", weight=10.0)]
    config = RewardConfig.model_validate({"parts": parts, "combine": way})
    totals = combine(config, [(Score(1e308),), (Score(1e308),)], groups=["g", "g"])
    assert [(total.value, total.status) for total in totals] == [(None, "grader_error")] * 2
    assert "its parts add up to" in (totals[0].reason or "")


@pytest.mark.parametrize(
    "score",
    [
        Score(None),
        Score(float("inf")),
        Score("1.0"),  # type: ignore[arg-type]
        Score(1.0, reason=7),  # type: ignore[arg-type]
        Score(1.0, "correct"),  # type: ignore[arg-type]
        Score(0.0, "grader_timeout", "slow"),
        Score(None, "grader_error"),
    ],
)
def test_a_score_that_is_neither_a_number_nor_a_failure_is_refused(score: Score) -> None:
    with pytest.raises(ValueError, match=r"got|no status"):
        checked(score)


@pytest.mark.parametrize(
    ("value", "status", "reason", "right"),
    [
        (1.0, "graded", None, True),
        (0.5, "graded", None, False),
        # What stands behind a closed gate is wrong; what is of another domain says nothing.
        (None, "not_applicable", "gate format is closed", False),
        (None, "not_applicable", "not for domain b", None),
        (None, "grader_error", "broken", None),
    ],
)
def test_accuracy_counts_what_is_behind_a_closed_gate_and_no_other_domain(
    value: float | None, status: str, reason: str | None, right: bool | None
) -> None:
    assert is_right(value, status, reason) is right
