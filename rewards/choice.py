"""Multiple choice: the final answer names the right option, by its letter or by its text."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from rewards.answer import TextConfig, answer_or_whole
from rewards.contract import GoldExample, RewardInput, Score
from rewards.notation import normalise, plain_words

_LETTERS = "ABCDEFGHIJ"
_LABEL = r"[(\[]?(?P<letter>[A-Ja-j])"
_INTRODUCTION = re.compile(
    r"(?:(?:the )?(?:(?:correct|right|best|final) )?(?:option|choice|answer)(?: is)?\b:? *)+", re.I
)
_BARE = re.compile(rf"{_LABEL}[)\].:]{{0,2}}")
_LABELLED = re.compile(rf"{_LABEL}(?:[)\].:]{{1,2}} *| *(?=\())(?P<rest>\S.*)", re.DOTALL)
_SPACED = re.compile(r"(?P<letter>[A-J]) *(?:[-–—] *)?(?P<rest>\S.*)", re.DOTALL)
_JOINT = re.compile(r" *(?:,|/|&|\bor\b|\band\b) *", re.I)
_OTHER_LABEL = re.compile(r"(?:,|/|&|\bor\b|\band\b) *(?:[(\[]?[A-J][)\].:]|[A-J]$)")


class Config(TextConfig):
    """Which options there are, and how the row says the right one."""

    num_choices: Annotated[int, Field(ge=2, le=10)] = 4
    """Letters offered, from A; where the row holds the options, their number counts."""
    options_field: str | None = None
    """Key of the row's extra that holds the options' texts: a list, or an object with the list
    under `text`. The text of an option then counts as its letter does."""
    gold: Literal["letter", "index", "text"] = "letter"
    """What the gold answer is: `B`, the number from 0 (`1`), or the right option's text."""


_OPTIONS = {"choices": ["Paris", "Lima", "Rome or Milan"]}

GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("<answer>(B)</answer>", answer="B")),
    GoldExample(RewardInput("\\boxed{\\text{C}}", answer="2"), {"gold": "index"}),
    GoldExample(
        RewardInput("Final answer: lima", answer="B", extra=_OPTIONS),
        {"options_field": "choices"},
    ),
    GoldExample(
        RewardInput("C) Rome or Milan", answer="Rome or Milan", extra=_OPTIONS),
        {"options_field": "choices", "gold": "text", "whole": True},
    ),
    GoldExample(RewardInput("<answer>J</answer>", answer="j"), {"num_choices": 10}),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the answer is the right option, else 0.

    Reasons: `no_final_answer`, `hedged` (several options, or a letter with another's text),
    `unreadable` (no option can be told), `wrong`.
    """
    gold = _gold_letter(item.answer, item.extra, config)
    if gold is None:
        return Score(None, "grader_error", check_gold(item.answer, item.extra, config))
    text = answer_or_whole(item, config)
    if isinstance(text, Score):
        return text
    chosen = _chosen(_plain(text), [_plain(option) for option in _options(item.extra, config)])
    if len(chosen) != 1:
        return Score(0.0, reason="hedged" if chosen else "unreadable")
    return Score(1.0) if chosen == {gold} else Score(0.0, reason="wrong")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the row's options or its gold answer are unusable, or None."""
    if _gold_letter(answer, extra, config) is not None:
        return None
    if config.options_field is not None and not _options(extra, config):
        return (
            f"the row's extra has no options {config.options_field!r}: expected 2 to "
            f"{len(_LETTERS)} texts"
        )
    if config.gold == "text" and config.options_field is None:
        return "a gold answer that is an option's text needs options_field"
    return (
        f"the gold answer {answer!r} is no {config.gold} of the {_num_choices(extra, config)} "
        "options"
    )


def _gold_letter(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns the right option's letter; None: the row is unusable."""
    letters = _LETTERS[: _num_choices(extra, config)]
    gold = _plain(answer or "")
    if config.gold == "text":
        matching = _by_text(gold, [_plain(option) for option in _options(extra, config)])
        return matching.pop() if len(matching) == 1 else None
    if config.gold == "index":
        is_index = gold.isascii() and gold.isdigit() and len(gold) < 3
        return letters[int(gold)] if is_index and int(gold) < len(letters) else None
    letter = _bare_letter(gold)
    return letter if letter and letter in letters else None


def _num_choices(extra: Mapping[str, Any], config: Config) -> int:
    return config.num_choices if config.options_field is None else len(_options(extra, config))


def _options(extra: Mapping[str, Any], config: Config) -> list[str]:
    """Returns the texts of the options, in order; none if the row does not hold usable ones."""
    if config.options_field is None:
        return []
    found = extra.get(config.options_field)
    if isinstance(found, Mapping):
        found = cast(Mapping[str, Any], found).get("text")
    if not isinstance(found, list | tuple):
        return []
    texts = [str(option) for option in cast(Sequence[Any], found) if option is not None]
    return texts if 2 <= len(texts) <= len(_LETTERS) and len(texts) == len(found) else []


def _plain(text: str) -> str:
    """Returns the text without markup around it, its blanks single."""
    return plain_words(normalise(text))


def _chosen(text: str, options: Sequence[str]) -> set[str]:
    """Returns the letters that the answer names: one, several (a hedge), or none to be told.

    An option's own text is looked at before joints and labels are: it may hold any of them.
    """
    introduction = _INTRODUCTION.match(text)
    bare = text[introduction.end() :] if introduction else text
    for candidate in (text, bare):
        letter = _bare_letter(candidate)
        named = {letter} if letter else _by_text(candidate, options)
        if named:
            return named
    letters = [_bare_letter(part) for part in _JOINT.split(bare.removeprefix("both "))]
    if all(letters):
        return {letter for letter in letters if letter}
    return _by_label(bare, options)


def _bare_letter(text: str) -> str | None:
    """Reads `B`, `(b)`, `B.` and letters in circles or of full width."""
    bare = _BARE.fullmatch(unicodedata.normalize("NFKC", text))
    return bare["letter"].upper() if bare else None


def _by_label(text: str, options: Sequence[str]) -> set[str]:
    """Reads `B) text` and `B (text)`, and `B text` where the text is an option's."""
    labelled = _LABELLED.fullmatch(text)
    found = labelled or _SPACED.fullmatch(text)
    if found is None:
        return set()
    letter = {found["letter"].upper()}
    said = _by_text(found["rest"], options) or _by_text(found["rest"].strip("()"), options)
    if letter <= said:
        return letter
    if said:
        return said | letter
    if labelled is None:
        return set()
    other = _OTHER_LABEL.search(found["rest"])
    return letter | {other[0]} if other else letter


def _by_text(text: str, options: Sequence[str]) -> set[str]:
    """Returns the letters of the options that say this, to the letter or else in another case."""
    lettered = [pair for pair in zip(_LETTERS, options, strict=False) if pair[1]]
    exact = {letter for letter, option in lettered if option == text}
    return exact or {letter for letter, option in lettered if option.casefold() == text.casefold()}
