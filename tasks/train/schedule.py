"""The learning rate: a function of the config and the update index, never of how a run was cut."""

import math

from tasks.train.contract import TrainConfig


def learning_rate(config: TrainConfig, update_index: int) -> float:
    """Returns the rate of optimizer update `update_index` (0 for the first of the run).

    Update k of a warm-up of w has (k + 1) / w of the rate, so that the first is not wasted.
    """
    if update_index < config.warmup_updates:
        return config.learning_rate * (update_index + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    assert config.schedule_updates is not None
    decaying = max(config.schedule_updates - config.warmup_updates, 1)
    done = min((update_index - config.warmup_updates) / decaying, 1.0)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.schedule_floor + (1.0 - config.schedule_floor) * left)
