"""Exact match: the final answer equals the gold answer, character for character."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.answer import TextConfig, answer_or_whole
from rewards.contract import GoldExample, RewardInput, Score


class Config(TextConfig):
    """How the answer is found and compared."""

    ignore_case: bool = False
    aliases_field: str | None = None
    """Key of the row's extra that holds a list of further right answers."""


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("so <answer>k</answer>", answer="k")),
    GoldExample(RewardInput("58", answer="58"), {"whole": True}),
    GoldExample(RewardInput("\\boxed{Paris}", answer="paris"), {"ignore_case": True}),
    GoldExample(
        RewardInput("\\boxed{NYC}", answer="New York", extra={"aliases": ["NYC"]}),
        {"aliases_field": "aliases"},
    ),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the answer is the gold answer, else 0; blanks around both are ignored.

    Two ways to encode one character (an accent apart or composed) are equal. Reasons:
    `no_final_answer`, `hedged` (several candidates), `wrong`.
    """
    problem = check_gold(item.answer, item.extra, config)
    if problem is not None:
        return Score(None, "grader_error", problem)
    answer = answer_or_whole(item, config)
    if isinstance(answer, Score):
        return answer
    golds = [item.answer, *_aliases(item.extra, config)]
    equal = _folded(answer, config) in {_folded(gold, config) for gold in golds if gold}
    return Score(1.0) if equal else Score(0.0, reason="wrong")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the gold answer or its aliases are unusable, or None."""
    if answer is None or not answer.strip():
        return "the gold answer is empty"
    aliases = _aliases(extra, config)
    if all(isinstance(alias, str) and alias.strip() for alias in aliases):
        return None
    return f"the row's {config.aliases_field!r} is no list of texts"


def _aliases(extra: Mapping[str, Any], config: Config) -> list[Any]:
    """Returns the row's further answers; a row without them has none."""
    found = None if config.aliases_field is None else extra.get(config.aliases_field)
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [None]


def _folded(text: str, config: Config) -> str:
    text = unicodedata.normalize("NFC", text.strip())
    return text.casefold() if config.ignore_case else text
