"""Length: what the number of sampled tokens costs, alone or together with correctness."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from rewards import is_foreign, needs, scorer
from rewards.contract import GoldExample, RewardInput, Score, Scorer, ScorerConfig


class Cosine(ScorerConfig):
    """What `shape="cosine"` pays for the shortest and the longest completion.

    The defaults make short right answers better than long ones and long wrong answers better than
    short ones; 1 stays the maximum.
    """

    correct_by: str = "exact"
    """The reward that says what is correct (a value of 1 or more); one that needs nothing but the
    sample."""
    correct_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """That reward's own settings."""
    correct_short: float = 1.0
    """`r_0^c`: correct, at length 0."""
    correct_long: float = 0.5
    """`r_L^c`: correct, towards `max_tokens`."""
    wrong_short: float = -1.0
    """`r_0^w`: wrong, at length 0."""
    wrong_long: float = -0.5
    """`r_L^w`: wrong, towards `max_tokens`."""
    exceeding: float = -1.0
    """`r_e`: cut off by the token limit, or `max_tokens` long."""

    @model_validator(mode="after")
    def _correctness_needs_only_the_sample(self) -> "Cosine":
        if is_foreign(self.correct_by):
            # Whoever reads a stored config must not run what it names.
            raise ValueError(
                f"correct_by={self.correct_by!r} is code from elsewhere. Expected exact, numeric, "
                "math ... : let a function of your own judge the length too."
            )
        if needs(self.correct_by) is not None:
            raise ValueError(
                f"correct_by={self.correct_by!r} needs a {needs(self.correct_by)}, which a length "
                "reward is not lent. Expected exact, numeric, math ... : weigh the other as a part "
                "of its own."
            )
        scorer(self.correct_by).Config.model_validate(self.correct_options)
        return self


class Config(ScorerConfig):
    """Which shape, and where it ends.

    Lengths are counted in sampled tokens, thinking and end mark included: the end mark is sampled
    and trained like any other token.
    """

    shape: Literal["soft_overlong", "cosine"] = "soft_overlong"
    """`soft_overlong`: 0, then falling to -1 (DAPO, arXiv 2503.14476, equation 13). `cosine`: a
    reward for correctness that depends on the length (arXiv 2502.03373, section 4)."""
    max_tokens: Annotated[int, Field(gt=0)]
    """`L_max`: usually the rollout's own token limit."""
    cache_tokens: Annotated[int, Field(ge=0)] = 0
    """`L_cache`: over how many tokens before `max_tokens` the penalty grows (`soft_overlong`); 0:
    all at once, beyond `max_tokens`."""
    cosine: Cosine = Cosine()

    @model_validator(mode="after")
    def _shape_and_settings_agree(self) -> "Config":
        if self.cache_tokens > self.max_tokens:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} exceeds max_tokens={self.max_tokens}. Expected "
                "a stretch before the limit: DAPO takes 4096 before 20480."
            )
        unused = "cosine" if self.shape == "soft_overlong" else "cache_tokens"
        if unused in self.model_fields_set:
            raise ValueError(
                f"{unused} says nothing to shape={self.shape!r}. Remove it, or choose the other "
                "shape."
            )
        return self


_COSINE = {"shape": "cosine", "max_tokens": 8}

GOLD: Sequence[GoldExample] = (
    GoldExample(
        RewardInput("short", token_ids=(5, 6, 7)), {"max_tokens": 8}, value=0.0, least=-1.0
    ),
    GoldExample(RewardInput("<answer>k</answer>", answer="k"), _COSINE, least=-1.0),
    GoldExample(
        RewardInput("\\boxed{0.5}", answer="\\frac12"),
        _COSINE | {"cosine": {"correct_by": "math", "correct_short": 2.0}},
        value=2.0,
        least=-1.0,
    ),
)


def score(item: RewardInput, config: Config) -> Score:
    """Returns the penalty or the length's reward; a failure of `correct_by` stays one.

    Reasons: `overlong` (the penalty has begun), `exceeding`, or what `correct_by` says.
    """
    num_tokens = len(item.token_ids)
    if config.shape == "soft_overlong":
        penalty = soft_overlong(
            num_tokens, max_tokens=config.max_tokens, cache_tokens=config.cache_tokens
        )
        return Score(penalty, reason="overlong" if penalty < 0 else None)
    shape = config.cosine
    correctness = _correctness(item, shape)
    if correctness.value is None:
        return Score(None, correctness.status, correctness.reason)
    if item.truncated or num_tokens >= config.max_tokens:
        return Score(shape.exceeding, reason="exceeding")
    if correctness.value >= 1.0:
        ends = shape.correct_short, shape.correct_long
    else:
        ends = shape.wrong_short, shape.wrong_long
    value = cosine(num_tokens / config.max_tokens, start=ends[0], end=ends[1])
    return Score(value, reason=correctness.reason)


def check_gold(answer: str | None, extra: Mapping[str, Any], config: Config) -> str | None:
    """Returns why `correct_by` cannot use the gold answer, or None."""
    if config.shape == "soft_overlong":
        return None
    shape = config.cosine
    module = scorer(shape.correct_by)
    return module.check_gold(answer, extra, module.Config(**shape.correct_options))


def soft_overlong(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Returns DAPO's penalty (equation 13), between 0 and -1."""
    free_tokens = max_tokens - cache_tokens
    if num_tokens <= free_tokens:
        return 0.0
    if num_tokens > max_tokens:
        return -1.0
    return (free_tokens - num_tokens) / cache_tokens


def cosine(share: float, *, start: float, end: float) -> float:
    """Returns what lies `share` of the way (0 to 1) from start to end, along half a cosine."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * share))


def _correctness(item: RewardInput, shape: Cosine) -> Score:
    module = cast(Scorer, scorer(shape.correct_by))
    return module.score(item, module.Config(**shape.correct_options))
