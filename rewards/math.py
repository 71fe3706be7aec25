"""Mathematical match: the final answer is the same mathematics as the gold answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.answer import NO_FINAL_ANSWER, AnswerConfig, final_answer
from rewards.contract import GoldExample, RewardInput, Score
from rewards.equivalence import equivalent, readable
from rewards.notation import normalise, plain_words

_ALTERNATIVES = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])")
_SEVERAL = re.compile(r"[,;{]|\\pm|\\mp|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\cup")


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
    gold = normalise(item.answer or "")
    found = final_answer(item, config)
    if not gold:
        return Score(None, "grader_error", check_gold(item.answer, item.extra, config))
    if found is None or not found.text:
        return Score(0.0, reason=NO_FINAL_ANSWER)
    answer = normalise(", ".join(found.alternatives) if found.alternatives else found.text)
    offers_several = bool(found.alternatives) or bool(_ALTERNATIVES.search(plain_words(answer)))
    if offers_several and not _SEVERAL.search(plain_words(gold)):
        return Score(0.0, reason="hedged")
    try:
        equal = equivalent(gold, answer)
    except RecursionError:  # Only the answer can be nested so deep: golds are checked at launch.
        equal = False
    if equal:
        return Score(1.0)
    # A wrong gold looks like a wrong answer: ask only then, it costs another parse.
    problem = check_gold(item.answer, item.extra, config)
    return Score(0.0, reason="wrong") if problem is None else Score(None, "grader_error", problem)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the gold answer is unusable, or None."""
    gold = normalise(answer or "")
    if not gold:
        return "the gold answer is empty"
    return None if readable(gold) else f"the gold answer {answer!r} cannot be parsed"
