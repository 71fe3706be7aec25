"""Mathematical match: the final answer is the same mathematics as the gold answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.answer import NO_FINAL_ANSWER, AnswerConfig, final_answer
from rewards.contract import GoldExample, RewardInput, Score
from rewards.equivalence import chosen, equivalent, is_choice, readable
from rewards.notation import normalise, plain_words, says_or

_SEVERAL = re.compile(
    r"[,;{<>]|\\(?:pm|mp|cup|lor|le|ge|ne)(?![A-Za-z])|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])"
)
_MAX_LENGTH = 4000
"""Characters of an answer that is read; longer ones can only be the gold's very text."""
_FULL_SOLUTION = re.compile(r".*####", re.DOTALL)


class Config(AnswerConfig):
    """How the answer is found; how it is compared is fixed by the rules of grading."""


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("So \\boxed{\\dfrac{6}{8}}.", answer="\\frac{3}{4}")),
    GoldExample(RewardInput("<answer>72</answer>", answer="72")),
    GoldExample(RewardInput("\\boxed{x<3}", answer="(-\\infty,3)")),
    GoldExample(RewardInput("\\boxed{x^2-x-2}", answer="(x+1)(x-2)")),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the answer equals the gold answer by the rules of grading, else 0.

    Reasons: `no_final_answer`, `hedged`, `wrong`. Heavy input may take very long: run it where it
    can be killed.
    """
    gold = _gold(item.answer)
    if not gold:
        return Score(None, "grader_error", check_gold(item.answer, item.extra, config))
    found = final_answer(item, config)
    if found is None:
        return Score(0.0, reason=NO_FINAL_ANSWER)
    text = ", ".join(found.alternatives) if found.alternatives else found.text
    if len(text) > max(_MAX_LENGTH, 2 * len(gold)):
        return _wrong(item, gold, config)
    answer = normalise(text)
    if not answer:
        return Score(0.0, reason=NO_FINAL_ANSWER)
    if _is_hedged(gold, answer, several=bool(found.alternatives)):
        return Score(0.0, reason="hedged")
    try:
        equal = equivalent(gold, answer)
    except RecursionError:  # Only the answer can be nested so deep: golds are checked at launch.
        equal = False
    # A missing gold that is written out (`None`) equals itself.
    return Score(1.0) if equal and readable(gold) else _wrong(item, gold, config)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the gold answer is unusable, or None."""
    gold = _gold(answer)
    if not gold:
        return "the gold answer is empty"
    return None if readable(gold) else f"the gold answer {answer!r} cannot be parsed"


def _gold(answer: str | None) -> str:
    """Returns the gold answer in one notation; of a whole solution, what it ends in."""
    text = answer or ""
    if "####" in text:
        text = _FULL_SOLUTION.sub("", text)
    elif "\\boxed" in text:
        boxed = final_answer(RewardInput(text), AnswerConfig(marks=("box",)))
        text = boxed.text if boxed else text
    return normalise(text)


def _is_hedged(gold: str, answer: str, *, several: bool) -> bool:
    if _SEVERAL.search(plain_words(gold)):
        return False
    if is_choice(gold) and not several:
        return chosen(answer) is None and says_or(answer)
    return several or says_or(answer)


def _wrong(item: RewardInput, gold: str, config: Config) -> Score:
    """A wrong gold looks like a wrong answer: only now it is asked for, it costs another parse."""
    if readable(gold):
        return Score(0.0, reason="wrong")
    return Score(None, "grader_error", check_gold(item.answer, item.extra, config))
