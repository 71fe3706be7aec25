"""What an evaluation says of a policy version, from its stage records. No Prefect here."""

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from flows.metrics import weighted_mean
from storage.experience import read_shard
from storage.layout import EvalScope
from storage.object_store import ObjectStore
from storage.records import EvalRecord, RecordRef, StageRecord
from storage.schemas import REWARDS
from tasks.reward.mixture import is_right


def eval_record(
    store: ObjectStore,
    scope: EvalScope,
    *,
    policy_digest: str,
    records: Sequence[tuple[RecordRef, StageRecord]],
    accuracy_part: str,
) -> EvalRecord:
    """Returns the evaluation that follows from these stage records; equal ones give equal bytes.

    Args:
        store: holds their shards.
        scope: which suite of which version.
        policy_digest: of that version.
        records: of all its rollout shards, then of all its reward shards, with their references.
        accuracy_part: the stored name of the reward part that counts as accuracy.
    """
    rollouts = [record for ref, record in records if ref.stage.startswith("rollout-")]
    rewards = [record for ref, record in records if ref.stage.startswith("reward-")]
    accuracies = _accuracy_by_prompt(store, rewards, accuracy_part)
    low, high = mean_interval(accuracies)
    return EvalRecord(
        run=scope.run,
        suite=scope.suite,
        policy_version=scope.version,
        policy_digest=policy_digest,
        records=[ref for ref, _ in records],
        num_prompts=len(accuracies),
        num_samples=sum(record.outputs["samples"].rows or 0 for record in rollouts),
        num_graded=int(sum(record.metrics.get("num_graded") or 0 for record in rewards)),
        accuracy=fmean(accuracies) if accuracies else None,
        low=low,
        high=high,
        reward_mean=weighted_mean(rewards, "reward_mean", by="num_graded"),
        metrics={
            "completion_tokens_mean": weighted_mean(rollouts, "completion_tokens_mean"),
            "truncated_share": weighted_mean(rollouts, "truncated_share"),
        },
    )


def _accuracy_by_prompt(
    store: ObjectStore, rewards: Sequence[StageRecord], part: str
) -> list[float]:
    """Returns, per prompt with a graded sample, the mean of the part that counts as accuracy."""
    means: list[float] = []
    for record in rewards:
        table = read_shard(store, record.outputs["rewards"], schema=REWARDS)
        rows = zip(
            table["sample_id"].to_pylist(),
            table["status"].to_pylist(),
            table["parts"].to_pylist(),
            strict=True,
        )
        graded = [
            (sample_id.rsplit("-", 1)[0], float(right))
            for sample_id, status, parts in rows
            if status == "graded" and (right := _is_right(parts, part)) is not None
        ]
        means += [
            fmean(value for _, value in group) for _, group in groupby(graded, lambda row: row[0])
        ]
    return means


def _is_right(parts: list[dict[str, Any]], name: str) -> bool | None:
    part = next((part for part in parts if part["name"] == name), None)
    return None if part is None else is_right(part["value"], part["status"], part["reason"])


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns the 95% interval of the mean over prompts, cut to [0, 1].

    Normal approximation with the sample deviation (ddof 1); the unit is the prompt, because the
    completions of one prompt are not independent. With all values equal it would have no width,
    so then the rule of three bounds it.
    """
    if len(values) < 2:
        return None, None
    mean, deviation = fmean(values), stdev(values)
    half = 1.96 * deviation / math.sqrt(len(values)) if deviation else 3 / len(values)
    return max(0.0, mean - half), min(1.0, mean + half)
