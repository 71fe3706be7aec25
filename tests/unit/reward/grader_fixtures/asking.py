"""A scoring function that asks a service what each completion is worth."""

from collections.abc import Sequence
from typing import Any

from rewards.contract import Endpoint, EndpointConfig, GoldExample, RewardInput, Score

NEEDS = "endpoint"
SERVES = "classify"
GOLD: Sequence[GoldExample] = ()


class Config(EndpointConfig):
    """What the service is asked for."""

    about: str = "worth"
    together: int = 1


def batch_items(config: Config) -> int:
    return config.together


def score_batch(items: Sequence[RewardInput], config: Config, endpoint: Endpoint) -> list[Score]:
    body = {"about": config.about, "texts": [item.completion for item in items]}
    values: list[Any] = endpoint.post("/ask", body, read=lambda answer: answer["values"])
    return [Score(value) for value in values]


def check_gold(answer: str | None, extra: Any, config: Config) -> str | None:
    return None
