"""Numeric match: the final answer is the same number as the gold answer, without algebra."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from rewards.answer import TextConfig, answer_or_whole
from rewards.contract import GoldExample, RewardInput, Score
from rewards.notation import normalise, says_or
from rewards.quantity import Quantity, parse_quantity, same_quantity


class Config(TextConfig):
    """How the number is found and compared."""

    relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Accept this much more than rule 5 does (exact, 1e-6 if the gold is a decimal)."""
    absolute_tolerance: Annotated[float, Field(ge=0)] = 0.0
    """The same in the unit of the gold answer, for golds that may be 0."""


GOLD: Sequence[GoldExample] = (
    GoldExample(RewardInput("so \\boxed{1,234}", answer="1234")),
    GoldExample(RewardInput("<answer>25%</answer>", answer="0.25")),
    GoldExample(RewardInput("58", answer="58"), {"whole": True}),
    GoldExample(RewardInput("\\boxed{3.1}", answer="3"), {"relative_tolerance": 0.05}),
    GoldExample(RewardInput("\\boxed{0.01}", answer="0"), {"absolute_tolerance": 0.02}),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns 1 if the answer is the gold number, else 0.

    Reasons: `no_final_answer`, `hedged`, `not_a_number`, `wrong`.
    """
    gold = parse_quantity(normalise(item.answer or ""))
    if gold is None:
        return Score(None, "grader_error", check_gold(item.answer, item.extra, config))
    text = answer_or_whole(item, config)
    if isinstance(text, Score):
        return text
    written = normalise(text)
    answer = parse_quantity(written)
    if answer is None:
        return Score(0.0, reason="hedged" if says_or(written) else "not_a_number")
    close = same_quantity(gold, answer) or _within(gold, answer, config)
    return Score(1.0) if close else Score(0.0, reason="wrong")


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why the gold answer is unusable, or None."""
    if answer is not None and parse_quantity(normalise(answer)) is not None:
        return None
    return f"the gold answer {answer!r} is not a number"


def _within(gold: Quantity, answer: Quantity, config: Config) -> bool:
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    # Fractions: a number of 400 digits is too large for a float.
    relative = Fraction(config.relative_tolerance) * abs(gold.value)
    tolerance = max(relative, Fraction(config.absolute_tolerance))
    return tolerance > 0 and abs(gold.value - answer.value) <= tolerance
