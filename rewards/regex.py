"""Regular expression: the answer, or the completion, matches a pattern of the recipe."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic import model_validator

from rewards.answer import AnswerConfig, answer_text, visible_text
from rewards.contract import GoldExample, RewardInput, Score

_ANSWER = "{answer}"


class Config(AnswerConfig):
    """Where the pattern must match, and what it has to do with the gold answer.

    Python's `re`; `.` matches line ends too. A pattern that backtracks without end is killed at the
    sample's CPU limit: `grader_timeout`, never 0.
    """

    pattern: str
    r"""`{answer}` in it stands for the gold answer, to the letter: `\s*{answer}\s*(?:km)?`."""
    text: Literal["answer", "visible", "completion"] = "answer"
    """`answer`: the final answer; `visible`: all outside `<think>`, without outer blanks;
    `completion`: all of it, as it was sampled."""
    match: Literal["full", "search"] = "full"
    """`full`: the whole text matches; `search`: some place of it does."""
    gold_group: str | int | None = None
    r"""The group, by name or number, that must equal the gold answer, outer blanks aside:
    `#### (.+?)$`. Where the pattern is searched and found several times, the last place counts."""
    ignore_case: bool = False

    @model_validator(mode="after")
    def _compiles_and_has_the_group(self) -> "Config":
        try:
            compiled = re.compile(self.pattern.replace(_ANSWER, "x"), re.DOTALL | re.MULTILINE)
        except re.error as error:
            raise ValueError(
                f"The pattern {self.pattern!r} is no regular expression: {error}."
            ) from None
        group = self.gold_group
        groups = range(compiled.groups + 1) if isinstance(group, int) else compiled.groupindex
        if group is not None and group not in groups:
            raise ValueError(
                f"The pattern {self.pattern!r} has no group {group!r}. Expected a number up to "
                f"{compiled.groups} (0: the whole match) or a name of {list(compiled.groupindex)}."
            )
        return self

    @property
    def needs_gold(self) -> bool:
        """Whether the row's answer takes part."""
        return self.gold_group is not None or _ANSWER in self.pattern


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("<answer>k7</answer>"), {"pattern": r"[a-z]\d"}),
    GoldExample(
        RewardInput("It is 5 km (not 4).", answer="5"),
        {"pattern": r"\b{answer} km\b", "text": "visible", "match": "search"},
    ),
    GoldExample(
        RewardInput("first #### 3\nthen #### 4\n", answer="4"),
        {"pattern": r"#### *(.+?)$", "text": "visible", "match": "search", "gold_group": 1},
    ),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the pattern matches, and its group is the gold answer if one is named; else 0.

    Reasons: `no_final_answer`, `hedged`, `no_match`, `wrong` (the group is another).
    """
    if problem := check_gold(item.answer, item.extra, config):
        return Score(None, "grader_error", problem)
    gold = (item.answer or "").strip()
    text = _text(item, config)
    if isinstance(text, Score):
        return text
    found = _match(_compiled(config.pattern, gold, config.ignore_case), text, config)
    if found is None:
        return Score(0.0, reason="no_match")
    if config.gold_group is None:
        return Score(1.0)
    group = (found[config.gold_group] or "").strip()
    equal = group.casefold() == gold.casefold() if config.ignore_case else group == gold
    return Score(1.0) if equal else Score(0.0, reason="wrong")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the gold answer is unusable, or None; it counts only where the pattern asks."""
    if not config.needs_gold or (answer or "").strip():
        return None
    return "the gold answer is empty"


def _text(item: RewardInput, config: Config) -> str | Score:
    if config.text == "answer":
        return answer_text(item, config)
    if config.text == "completion":
        return item.completion
    return visible_text(item.completion, prompt=item.prompt).strip()


def _match(pattern: re.Pattern[str], text: str, config: Config) -> re.Match[str] | None:
    if config.match == "full":
        return pattern.fullmatch(text)
    if config.gold_group is None:
        return pattern.search(text)
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


@lru_cache(maxsize=256)
def _compiled(pattern: str, gold: str, ignore_case: bool) -> re.Pattern[str]:
    flags = re.DOTALL | re.MULTILINE | (re.IGNORECASE if ignore_case else 0)
    return re.compile(pattern.replace(_ANSWER, re.escape(gold)), flags)
