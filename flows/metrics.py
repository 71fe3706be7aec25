"""The numbers of a step: what its commit carries, from the stage records' metrics."""

from collections.abc import Mapping, Sequence

from storage.records import Metrics, StageRecord

FROM_REWARD = ("reward_mean", "accuracy")
FROM_ROLLOUT = ("completion_tokens_mean", "truncated_share")


def weighted_mean(
    records: Sequence[StageRecord], name: str, *, by: str = "num_samples"
) -> float | None:
    """Returns the mean of metric `name` over shards, each weighted by its metric `by`."""
    pairs = [(record.metrics.get(name), record.metrics.get(by) or 0.0) for record in records]
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def metric_sum(records: Sequence[StageRecord], name: str) -> float:
    """Returns the sum of metric `name` over shards."""
    return sum(record.metrics.get(name) or 0.0 for record in records)


def step_metrics(
    rollouts: Sequence[StageRecord],
    rewards: Sequence[StageRecord],
    trained: StageRecord,
    seconds: Mapping[str, float],
) -> Metrics:
    """Returns what a step commit says of its step: means over samples, and seconds by stage."""
    metrics: Metrics = dict(trained.metrics)
    metrics |= {name: weighted_mean(rollouts, name) for name in FROM_ROLLOUT}
    metrics |= {name: weighted_mean(rewards, name, by="num_graded") for name in FROM_REWARD}
    metrics["num_samples"] = metric_sum(rollouts, "num_samples")
    metrics["num_graded"] = metric_sum(rewards, "num_graded")
    metrics["completion_tokens"] = metric_sum(rollouts, "completion_tokens")
    return metrics | {name: round(value, 4) for name, value in seconds.items()}
