"""A scoring function for `rewards.py` that computes for ever where the answer says so."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.contract import GoldExample, RewardInput, Score, ScorerConfig


class Config(ScorerConfig):
    """Nothing to set."""


GOLD: Sequence[GoldExample] = ()


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1, or never returns."""
    while "{hang}" in item.completion:
        pass
    return Score(1.0)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns None."""
    return None
