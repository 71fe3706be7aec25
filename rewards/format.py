"""Format: the whole completion has the shape that the recipe asks for."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, field_validator

from rewards.contract import GoldExample, RewardInput, Score, ScorerConfig

_NAME = re.compile(r"[^\s<>/]+")


class Config(ScorerConfig):
    """Which shape; a regular expression, or tags in order."""

    pattern: str | None = None
    """Must match the whole completion (`.` matches line ends); None: `tags` decide."""
    tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer")
    """`<a>...</a>` once each, in this order, with nothing but blanks around them. Where the prompt
    ends with the first one's opening, as chat templates do with `<think>`, that counts."""

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

    @field_validator("tags")
    @classmethod
    def _are_names(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        odd = [tag for tag in tags if not _NAME.fullmatch(tag) or tags.count(tag) > 1]
        if odd:
            raise ValueError(
                f"tags={list(tags)} holds {odd[0]!r}, which no completion could satisfy. Expected "
                "names without their angle brackets, each once: [think, answer]."
            )
        return tags


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("<think>9 times 8</think>\n<answer>72</answer>")),
    GoldExample(RewardInput("<answer>k</answer>"), {"tags": ["answer"]}),
    GoldExample(RewardInput("9 times 8</think><answer>72</answer>", prompt="What?<think>\n")),
    GoldExample(RewardInput("<answer>k</answer>"), {"pattern": "<answer>[a-z]</answer>"}),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the whole completion has the shape, else 0 with reason `wrong_format`."""
    if config.pattern is not None:
        matches = _compiled(config.pattern).fullmatch(item.completion) is not None
    else:
        matches = _has_tags(_opening(item.prompt, config) + item.completion, config.tags)
    return Score(1.0) if matches else Score(0.0, reason="wrong_format")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns None: the shape does not depend on the row."""
    return None


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _opening(prompt: str | None, config: Config) -> str:
    """Returns the first tag's opening if it is the end of the prompt."""
    opening = f"<{config.tags[0]}>"
    return opening if (prompt or "").rstrip().endswith(opening) else ""


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
