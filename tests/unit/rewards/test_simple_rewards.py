import pytest
from pydantic import ValidationError

from rewards import exact, format, numeric, scorer
from rewards.contract import RewardInput


@pytest.mark.parametrize(
    ("completion", "gold", "options", "value", "reason"),
    [
        ("<answer>k</answer>", "k", {}, 1.0, None),
        ("<answer>K</answer>", "k", {}, 0.0, "wrong"),
        ("k", "k", {}, 0.0, "no_final_answer"),
        (" 58\n", "58", {"whole": True}, 1.0, None),
        ("<think>58</think>59", "59", {"whole": True}, 1.0, None),
        ("<answer>a</answer> or <answer>b</answer>", "b", {}, 0.0, "hedged"),
        ("", "k", {"whole": True}, 0.0, "wrong"),
    ],
)
def test_exact_compares_character_for_character(
    completion: str, gold: str, options: dict, value: float, reason: str | None
) -> None:
    score = exact.score(RewardInput(completion, answer=gold), exact.Config(**options))
    assert (score.value, score.reason) == (value, reason)


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{12\text{ cm}}", "12", 1.0),
        (r"\boxed{25\%}", "1/4", 1.0),
        (r"\boxed{0.33}", "1/3", 0.0),
        # |0.3333333 - 0.33333333| / 0.33333333 = 1e-7 <= 1e-6, and the gold is a decimal.
        (r"\boxed{0.3333333}", "0.33333333", 1.0),
        (r"\boxed{2 1/4}", "9/4", 1.0),
        (r"\boxed{x}", "3", 0.0),
        (r"\boxed{-7}", "7", 0.0),
    ],
)
def test_numeric_compares_numbers(completion: str, gold: str, value: float) -> None:
    assert numeric.score(RewardInput(completion, answer=gold), numeric.Config()).value == value


def test_a_gold_that_is_no_number_is_an_error_and_not_a_zero() -> None:
    score = numeric.score(RewardInput(r"\boxed{5}", answer="five"), numeric.Config())
    assert (score.value, score.status) == (None, "grader_error")


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer><|im_end|>", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
    ],
)
def test_format_matches_the_whole_completion(completion: str, value: float) -> None:
    assert format.score(RewardInput(completion), format.Config()).value == value


def test_pattern_matches_the_whole_completion_or_not_at_all() -> None:
    config = format.Config(pattern="<answer>[a-z]</answer>")
    assert format.score(RewardInput("<answer>k</answer>"), config).value == 1.0
    assert format.score(RewardInput("<answer>k</answer>\n"), config).value == 0.0
    with pytest.raises(ValidationError, match="no regular expression"):
        format.Config(pattern="(")


def test_unknown_reward_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match="Did you mean exact"):
        scorer("exat")
    with pytest.raises(ValueError, match="does not import"):
        scorer("no_such_package.reward")
