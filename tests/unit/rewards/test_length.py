import pytest
from pydantic import ValidationError

from rewards import length
from rewards.contract import RewardInput, Score

COSINE = {"shape": "cosine", "max_tokens": 300}


def sample(
    completion: str, *, num_tokens: int, gold: str = "7", finish_reason: str = "stop"
) -> RewardInput:
    return RewardInput(
        completion, answer=gold, token_ids=(1,) * num_tokens, finish_reason=finish_reason
    )


@pytest.mark.parametrize(
    ("num_tokens", "value", "reason"),
    [
        (0, 0.0, None),
        (16384, 0.0, None),
        # DAPO's own numbers: L_max - L_cache = 20480 - 4096 = 16384; half way, at 18432 tokens,
        # (16384 - 18432) / 4096 = -0.5.
        (18432, -0.5, "overlong"),
        (20480, -1.0, "overlong"),
        (20481, -1.0, "overlong"),
    ],
)
def test_soft_overlong_falls_over_the_cache(
    num_tokens: int, value: float, reason: str | None
) -> None:
    config = length.Config(max_tokens=20480, cache_tokens=4096)
    item = sample("", num_tokens=num_tokens)
    assert length.score(item, config) == Score(value, reason=reason)


def test_without_a_cache_the_penalty_comes_at_once() -> None:
    config = length.Config(max_tokens=8)
    values = [length.score(sample("", num_tokens=count), config).value for count in (8, 9)]
    assert values == [0.0, -1.0]


@pytest.mark.parametrize(
    ("completion", "num_tokens", "value", "reason"),
    [
        # 0.5 + (1 - 0.5) / 2 x (1 + cos 0) = 1
        (r"\boxed{7}", 0, 1.0, None),
        # a third of the way: 0.5 + 0.25 x (1 + cos 60°) = 0.5 + 0.25 x 1.5
        (r"\boxed{7}", 100, 0.875, None),
        # half way: 0.5 + 0.25 x (1 + cos 90°) = 0.75
        (r"\boxed{7}", 150, 0.75, None),
        # wrong: -0.5 + (-1 + 0.5) / 2 x (1 + cos 60°) = -0.5 - 0.25 x 1.5
        (r"\boxed{8}", 100, -0.875, "wrong"),
        ("7", 100, -0.875, "no_final_answer"),
        (r"\boxed{7}", 300, -1.0, "exceeding"),
    ],
)
def test_cosine_prefers_short_right_and_long_wrong_answers(
    completion: str, num_tokens: int, value: float, reason: str | None
) -> None:
    score = length.score(sample(completion, num_tokens=num_tokens), length.Config(**COSINE))
    assert score.value == pytest.approx(value, abs=1e-12)
    assert score.reason == reason


def test_a_truncated_completion_exceeds_wherever_the_limit_was() -> None:
    item = sample(r"\boxed{7}", num_tokens=10, finish_reason="length")
    assert length.score(item, length.Config(**COSINE)) == Score(-1.0, reason="exceeding")


def test_correctness_is_what_the_named_reward_says() -> None:
    item = sample(r"\boxed{0.5}", num_tokens=0, gold=r"\frac{1}{2}")
    by_math = length.Config(**COSINE, cosine={"correct_by": "math"})
    assert length.score(item, length.Config(**COSINE)).value == -1.0
    assert length.score(item, by_math).value == 1.0


def test_a_failure_of_the_named_reward_stays_a_failure() -> None:
    config = length.Config(**COSINE, cosine={"correct_by": "numeric"})
    score = length.score(sample(r"\boxed{7}", num_tokens=400, gold="seven"), config)
    assert (score.value, score.status) == (None, "grader_error")
    assert length.check_gold("seven", {}, config) == "the gold answer 'seven' is not a number"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "max_tokens"),
        ({"max_tokens": 10, "cache_tokens": 11}, "exceeds max_tokens=10"),
        ({"max_tokens": 10, "cosine": {}}, "cosine says nothing to shape='soft_overlong'"),
        (COSINE | {"cache_tokens": 4}, "cache_tokens says nothing to shape='cosine'"),
        (COSINE | {"cosine": {"correct_by": "exat"}}, "Did you mean exact"),
        (COSINE | {"cosine": {"correct_options": {"hole": True}}}, "hole"),
        (COSINE | {"cosine": {"correct_by": "python"}}, "code from elsewhere"),
        (COSINE | {"cosine": {"correct_by": "mine.scores"}}, "code from elsewhere"),
    ],
)
def test_settings_that_say_nothing_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        length.Config(**options)
