"""Format: the whole completion has the shape that the recipe asks for."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import field_validator

from rewards.contract import GoldExample, RewardInput, Score, ScorerConfig


class Config(ScorerConfig):
    """Which shape; a regular expression, or tags in order."""

    pattern: str | None = None
    """Must match the whole completion (`.` matches line ends); None: `tags` decide."""
    tags: tuple[str, ...] = ("think", "answer")
    """`<a>...</a>` once each, in this order, with nothing but blanks around them."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(
                f"The pattern {pattern!r} is no regular expression: {error}."
            ) from None
        return pattern


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("<think>9 times 8</think>\n<answer>72</answer>")),
    GoldExample(RewardInput("<answer>k</answer>"), {"tags": ["answer"]}),
    GoldExample(RewardInput("<answer>k</answer>"), {"pattern": "<answer>[a-z]</answer>"}),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the whole completion has the shape, else 0 with reason `wrong_format`."""
    if config.pattern is not None:
        matches = _compiled(config.pattern).fullmatch(item.completion) is not None
    else:
        matches = _has_tags(item.completion.strip(), config.tags)
    return Score(1.0) if matches else Score(0.0, reason="wrong_format")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns None: the shape does not depend on the row."""
    return None


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _has_tags(text: str, tags: Sequence[str]) -> bool:
    """Walks through the text once: a pattern of lazy groups is quadratic on hostile input."""
    position = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start, end = text.find(opening, position), text.find(closing, position)
        if start < 0 or end < start or text[position:start].strip():
            return False
        position = end + len(closing)
    return not text[position:].strip()
