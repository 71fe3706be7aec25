import pytest
from pydantic import ValidationError

from rewards import regex
from rewards.contract import RewardInput

HASHES = {"pattern": r"#### *(.+?)$", "text": "visible", "match": "search", "gold_group": 1}
NAMED = {"pattern": r"(?P<n>\d+) apples?", "gold_group": "n"}


@pytest.mark.parametrize(
    ("completion", "gold", "options", "value", "reason"),
    [
        ("<answer>k7</answer>", None, {"pattern": r"[a-z]\d"}, 1.0, None),
        ("<answer>k7!</answer>", None, {"pattern": r"[a-z]\d"}, 0.0, "no_match"),
        ("<answer>k7!</answer>", None, {"pattern": r"[a-z]\d", "match": "search"}, 1.0, None),
        ("k7", None, {"pattern": r"[a-z]\d"}, 0.0, "no_final_answer"),
        (r"\boxed{a} or \boxed{b}", None, {"pattern": "[ab]"}, 0.0, "hedged"),
        # The gold answer is text, not pattern: its dot and its braces match only themselves.
        ("<answer>1.5 km</answer>", "1.5", {"pattern": r"{answer}\s*km"}, 1.0, None),
        ("<answer>125 km</answer>", "1.5", {"pattern": r"{answer}\s*km"}, 0.0, "no_match"),
        ("<answer>aa</answer>", "a{2}", {"pattern": "{answer}"}, 0.0, "no_match"),
        ("<answer>aa</answer>", None, {"pattern": "a{2}"}, 1.0, None),
        # The last place counts, and a wrong one after the right one is wrong.
        ("#### 3\n#### 4", "4", HASHES, 1.0, None),
        ("#### 4\n#### 3", "4", HASHES, 0.0, "wrong"),
        ("<think>#### 4</think>", "4", HASHES, 0.0, "no_match"),
        ("<answer>5 apples</answer>", "5", NAMED, 1.0, None),
        ("<answer>6 apples</answer>", "5", NAMED, 0.0, "wrong"),
        ("<answer>YES</answer>", "yes", {"pattern": "{answer}"}, 0.0, "no_match"),
        ("<answer>YES</answer>", "yes", {"pattern": "{answer}", "ignore_case": True}, 1.0, None),
        # An optional group that took no part is not the gold answer.
        ("<answer>b</answer>", "a", {"pattern": "(a)?b", "gold_group": 1}, 0.0, "wrong"),
        ("a\nb\n", None, {"pattern": "a.b\n", "text": "completion"}, 1.0, None),
        ("a\nb\n", None, {"pattern": "a.b", "text": "completion"}, 0.0, "no_match"),
        ("\n a\nb \n", None, {"pattern": "a.b", "text": "visible"}, 1.0, None),
        ("<answer>\ud800</answer>", "\ud800", {"pattern": "{answer}"}, 1.0, None),
    ],
)
def test_pattern_is_matched_where_it_should_be(
    completion: str, gold: str | None, options: dict, value: float, reason: str | None
) -> None:
    score = regex.score(RewardInput(completion, answer=gold), regex.Config(**options))
    assert (score.value, score.reason) == (value, reason)


@pytest.mark.parametrize("gold", [None, "", "  "])
def test_an_empty_gold_is_an_error_only_where_it_takes_part(gold: str | None) -> None:
    item = RewardInput("<answer>a</answer>", answer=gold)
    asks = regex.Config(pattern="{answer}")
    assert regex.check_gold(gold, {}, asks) == "the gold answer is empty"
    assert regex.score(item, asks).status == "grader_error"
    assert regex.score(item, regex.Config(pattern="a")).value == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "a", "gold_group": 1}, "has no group 1"),
        ({"pattern": "(?P<n>a)", "gold_group": "m"}, r"has no group 'm'.*\['n'\]"),
        ({"pattern": "a", "gold_group": -1}, "has no group -1"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        regex.Config(**options)
