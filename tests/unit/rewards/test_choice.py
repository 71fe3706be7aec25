import pytest

from rewards import choice
from rewards.contract import RewardInput

CITIES = {"choices": ["Paris", "Lima", "Rome or Milan", "All of the above"]}


def verdict(text: str, answer: str, **options: object) -> tuple[float | None, str | None]:
    item = RewardInput(f"<answer>{text}</answer>", answer=answer, extra=CITIES)
    score = choice.score(item, choice.Config(**options))
    return score.value, score.reason


@pytest.mark.parametrize(
    "text",
    [
        *["B", "b", "(B)", "[b]", "B.", "B)", "(B).", "$B$", "**B**", r"\text{B}", r"\textbf{(B)}"],
        *["Option B", "option (b)", "Answer: B", "The answer is B.", "The correct answer is (B)"],
        *["The answer is option B", "Choice B) Quito", "B) Quito", "B. Quito", "(B) Quito"],
        *["B: Quito or Lima", "B (Quito)", "Ｂ", "Ⓑ", "（B）", "B\n"],
    ],
)
def test_every_way_to_write_the_letter_is_read(text: str) -> None:
    assert verdict(text, "B") == (1.0, None)
    assert verdict(text, "C") == (0.0, "wrong")


@pytest.mark.parametrize(
    "text",
    [
        *["A or B", "A, B", "A and B", "A/B", "both A and B", "(A) or (B)", "Option A or B"],
        *["A & B.", "B) Quito or C) Lima", "A) Quito, (B) Lima", "A) Quito or B"],
    ],
)
def test_several_letters_are_a_hedge(text: str) -> None:
    assert verdict(text, "B") == (0.0, "hedged")


@pytest.mark.parametrize(
    "text", ["", "Quito", "В", "7", "none of them", "A B", "Be", "?", "\ud800"]
)
def test_what_names_no_option_is_unreadable(text: str) -> None:
    assert verdict(text, "B") == (0.0, "unreadable")


@pytest.mark.parametrize("text", ["E", "(J)", "E) Quito"])
def test_a_letter_that_is_not_offered_is_wrong(text: str) -> None:
    assert verdict(text, "B") == (0.0, "wrong")


@pytest.mark.parametrize(
    ("text", "gold", "value", "reason"),
    [
        ("Lima", "B", 1.0, None),
        ("lima", "B", 1.0, None),
        ("The answer is Lima.", "B", 1.0, None),
        ("Lima", "A", 0.0, "wrong"),
        ("B) Lima", "B", 1.0, None),
        ("B Lima", "B", 1.0, None),
        ("B - Lima", "B", 1.0, None),
        # The letter of one option with the text of another.
        ("A) Lima", "B", 0.0, "hedged"),
        ("A (Lima)", "A", 0.0, "hedged"),
        ("Rome or Milan", "C", 1.0, None),
        ("C) Rome or Milan", "C", 1.0, None),
        ("all of the above", "D", 1.0, None),
        ("Quito", "B", 0.0, "unreadable"),
    ],
)
def test_the_text_of_an_option_counts_as_its_letter(
    text: str, gold: str, value: float, reason: str | None
) -> None:
    assert verdict(text, gold, options_field="choices") == (value, reason)


def test_a_letter_means_its_option_even_where_options_are_letters() -> None:
    item = RewardInput("<answer>A</answer>", answer="A", extra={"choices": ["B", "A"]})
    assert choice.score(item, choice.Config(options_field="choices")).value == 1.0


def test_options_that_differ_in_case_alone_are_told_apart() -> None:
    item = RewardInput("<answer>pH</answer>", answer="B", extra={"choices": ["PH", "pH"]})
    assert choice.score(item, choice.Config(options_field="choices")).value == 1.0


def test_options_may_stand_under_text_as_some_data_sets_have_them() -> None:
    extra = {"choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}}
    config = choice.Config(options_field="choices")
    assert choice.score(RewardInput("<answer>z</answer>", answer="C", extra=extra), config).value
    assert choice.check_gold("D", extra, config) == (
        "the gold answer 'D' is no letter of the 3 options"
    )


def test_gold_may_be_an_index_from_zero_or_a_text() -> None:
    assert verdict("B", "1", gold="index") == (1.0, None)
    assert verdict("A", "1", gold="index") == (0.0, "wrong")
    assert verdict("B", "Lima", gold="text", options_field="choices") == (1.0, None)


@pytest.mark.parametrize(
    ("gold", "extra", "options", "message"),
    [
        (None, {}, {}, "None is no letter of the 4"),
        ("E", {}, {}, "'E' is no letter of the 4"),
        ("1", {}, {}, "'1' is no letter"),
        ("4", {}, {"gold": "index"}, "'4' is no index of the 4"),
        ("-1", {}, {"gold": "index"}, "'-1' is no index"),
        ("²", {}, {"gold": "index"}, "is no index"),
        ("B", {"gold": "index"}, {"gold": "index"}, "'B' is no index"),
        ("A", {}, {"options_field": "choices"}, "no options 'choices'"),
        ("A", {"choices": ["x"]}, {"options_field": "choices"}, "no options 'choices'"),
        ("A", {"choices": "xyz"}, {"options_field": "choices"}, "no options 'choices'"),
        ("A", {"choices": ["x", None]}, {"options_field": "choices"}, "no options 'choices'"),
        ("x", {}, {"gold": "text"}, "needs options_field"),
        ("x", {"choices": ["x", "x"]}, {"gold": "text", "options_field": "choices"}, "no text"),
    ],
)
def test_a_row_that_names_no_option_is_an_error(
    gold: str | None, extra: dict, options: dict, message: str
) -> None:
    config = choice.Config(**options)
    problem = choice.check_gold(gold, extra, config)
    assert problem is not None
    assert message in problem
    score = choice.score(RewardInput("<answer>A</answer>", answer=gold, extra=extra), config)
    assert (score.value, score.status, score.reason) == (None, "grader_error", problem)


def test_more_letters_can_be_offered() -> None:
    assert verdict("J", "J", num_choices=10) == (1.0, None)
    assert verdict("(H) Quito", "H", num_choices=8) == (1.0, None)
