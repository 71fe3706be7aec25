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


def test_exact_takes_two_encodings_of_one_character_for_equal() -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    assert exact.score(RewardInput(f"\\boxed{{{apart}}}", answer=composed), exact.Config()).value
    assert exact.score(RewardInput("\\boxed{cafe}", answer=composed), exact.Config()).value == 0.0


@pytest.mark.parametrize(
    ("completion", "extra", "value", "status"),
    [
        ("NYC", {"aliases": ["NYC", "The Big Apple"]}, 1.0, "graded"),
        ("New York", {"aliases": []}, 1.0, "graded"),
        ("New York", {}, 1.0, "graded"),
        ("Boston", {"aliases": ["NYC"]}, 0.0, "graded"),
        ("N", {"aliases": "NYC"}, None, "grader_error"),
        ("7", {"aliases": [7]}, None, "grader_error"),
        ("", {"aliases": [""]}, None, "grader_error"),
    ],
)
def test_exact_takes_the_row_s_aliases(
    completion: str, extra: dict, value: float | None, status: str
) -> None:
    item = RewardInput(f"<answer>{completion}</answer>", answer="New York", extra=extra)
    score = exact.score(item, exact.Config(aliases_field="aliases"))
    assert (score.value, score.status) == (value, status)


@pytest.mark.parametrize(
    ("completion", "gold", "options", "value", "reason"),
    [
        ("0.01", "0", {"absolute_tolerance": 0.02}, 1.0, None),
        ("0.03", "0", {"absolute_tolerance": 0.02}, 0.0, "wrong"),
        ("5.1 m", "5 m", {"relative_tolerance": 0.05}, 1.0, None),
        ("5.1 cm", "5 m", {"relative_tolerance": 0.05}, 0.0, "wrong"),
        # Numbers that no float can hold.
        ("2e399", "1e399", {"relative_tolerance": 0.5}, 0.0, "wrong"),
        ("1.2e399", "1e399", {"relative_tolerance": 0.5}, 1.0, None),
        ("3 or 4", "3", {}, 0.0, "hedged"),
        (r"3 \text{ or } 4", "3", {}, 0.0, "hedged"),
        ("for 3", "3", {}, 0.0, "not_a_number"),
        ("nan", "3", {"absolute_tolerance": 1e9}, 0.0, "not_a_number"),
        ("１２", "12", {}, 1.0, None),
        ("٣", "3", {}, 1.0, None),
        ("³", "3", {}, 0.0, "not_a_number"),
        ("1_000", "1000", {}, 0.0, "not_a_number"),
    ],
)
def test_numeric_holds_where_a_float_or_a_naive_reader_would_not(
    completion: str, gold: str, options: dict, value: float, reason: str | None
) -> None:
    item = RewardInput(f"\\boxed{{{completion}}}", answer=gold)
    score = numeric.score(item, numeric.Config(**options))
    assert (score.value, score.reason) == (value, reason)


@pytest.mark.parametrize(
    ("prompt", "completion", "value"),
    [
        ("What?<think>\n", "a</think><answer>b</answer>", 1.0),
        ("What?<think>\n", "<think>a</think><answer>b</answer>", 0.0),
        ("What?<think>\n", "a<answer>b</answer>", 0.0),
        ("Use <think> and <answer>.", "a</think><answer>b</answer>", 0.0),
    ],
)
def test_an_opening_tag_at_the_end_of_the_prompt_counts(
    prompt: str, completion: str, value: float
) -> None:
    assert format.score(RewardInput(completion, prompt=prompt), format.Config()).value == value


@pytest.mark.parametrize("tags", [[], ["<think>"], ["a", "a"], [""], ["a b"]])
def test_tags_that_no_completion_could_satisfy_are_refused(tags: list[str]) -> None:
    with pytest.raises(ValidationError, match=r"which no completion could satisfy|at least 1 item"):
        format.Config(tags=tags)
