"""Exact match: the final answer equals the gold answer, character for character."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.answer import NO_FINAL_ANSWER, AnswerConfig, final_answer, visible_text
from rewards.contract import GoldExample, RewardInput, Score


class Config(AnswerConfig):
    """How the answer is found and compared."""

    whole: bool = False
    """Compare the whole completion outside `<think>`, for tasks whose output is the answer."""
    ignore_case: bool = False


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("so <answer>k</answer>", answer="k")),
    GoldExample(RewardInput("58", answer="58"), {"whole": True}),
    GoldExample(RewardInput("\\boxed{Paris}", answer="paris"), {"ignore_case": True}),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the answer is the gold answer, else 0; blanks around both are ignored.

    Reasons: `no_final_answer`, `hedged` (several candidates), `wrong`.
    """
    gold = (item.answer or "").strip()
    if not gold:
        return Score(None, "grader_error", check_gold(item.answer, item.extra, config))
    if config.whole:
        answer = visible_text(item.completion, prompt=item.prompt).strip()
    else:
        found = final_answer(item, config)
        if found is None:
            return Score(0.0, reason=NO_FINAL_ANSWER)
        if found.alternatives:
            return Score(0.0, reason="hedged")
        answer = found.text
    equal = _folded(answer, config) == _folded(gold, config)
    return Score(1.0) if equal else Score(0.0, reason="wrong")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the gold answer is unusable, or None."""
    return None if answer is not None and answer.strip() else "the gold answer is empty"


def _folded(text: str, config: Config) -> str:
    return text.casefold() if config.ignore_case else text
