"""Repetition: a penalty for saying the same n words, or tokens, again and again."""

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rewards.answer import visible_text
from rewards.contract import GoldExample, RewardInput, Score, ScorerConfig

# Thai and Lao, Burmese, Khmer, kana, Han: written without blanks between the words.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_UNIT = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


class Config(ScorerConfig):
    """What counts as a repetition, and what a text of nothing else costs."""

    ngram_size: Annotated[int, Field(gt=0, le=100)] = 3
    max_penalty: Annotated[float, Field(lt=0)] = -1.0
    """The value towards which it falls as the share of repeated n-grams grows to 1."""
    unit: Literal["words", "tokens"] = "words"
    """`words`: what stands between blanks, whatever its case; in scripts without blanks, each
    character. `tokens`: sampled ids."""
    text: Literal["completion", "visible"] = "completion"
    """`visible`: only words outside `<think>` count."""


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("one two three four five"), value=0.0, least=-1.0),
    GoldExample(
        RewardInput("", token_ids=(1, 2, 1, 1)),
        {"unit": "tokens", "ngram_size": 2, "max_penalty": -0.5},
        value=0.0,
        least=-0.5,
    ),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns max_penalty x (1 - distinct n-grams / all n-grams), reason `repeated` if below 0.

    Takes time and memory linear in the length, as arXiv 2502.03373 and open-r1 do per completion.
    A text shorter than one n-gram is not penalised.
    """
    share = repeated_share(_units(item, config), ngram_size=config.ngram_size)
    if share == 0.0:
        return Score(0.0)
    return Score(config.max_penalty * share, reason="repeated")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns None: the penalty does not depend on the row."""
    return None


def repeated_share(units: Sequence[Hashable], *, ngram_size: int) -> float:
    """Returns which share of the n-grams of `units` was there before, from 0 to below 1."""
    num_ngrams = len(units) - ngram_size + 1
    if num_ngrams <= 0:
        return 0.0
    ngrams = zip(*(units[start:] for start in range(ngram_size)), strict=False)
    return 1.0 - len(set(ngrams)) / num_ngrams


def _units(item: RewardInput, config: Config) -> Sequence[Hashable]:
    if config.unit == "tokens":
        return item.token_ids
    text = item.completion
    if config.text == "visible":
        text = visible_text(text, prompt=item.prompt)
    return _UNIT.findall(text.casefold())
