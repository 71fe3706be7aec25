"""From stored shards to optimizer updates, and back to the rows of a train shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storage.errors import Corrupt
from storage.experience import read_shard
from storage.object_store import ObjectStore
from storage.records import Metrics, ObjectRef
from storage.schemas import REWARDS, SAMPLES, TRAIN
from tasks.train.algorithms import ALGORITHMS
from tasks.train.algorithms.contract import GradedSample, Verdict, Verdicts
from tasks.train.contract import TrainConfig, TrainSample, Update
from tasks.train.schedule import learning_rate

_SAMPLE_COLUMNS = [
    "sample_id",
    "group_id",
    "prompt_token_ids",
    "completion_token_ids",
    "completion_mask",
    "rollout_logprobs",
    "finish_reason",
]


@dataclass(frozen=True)
class Experience:
    """One step's samples in plan order, and what the graders said of each."""

    rows: list[dict[str, Any]]
    graded: list[GradedSample]


def read_experience(
    store: ObjectStore, *, samples: Sequence[ObjectRef], rewards: Sequence[ObjectRef]
) -> Experience:
    """Returns the samples of all shards; `samples[i]` and `rewards[i]` are of the same groups.

    Raises:
        Corrupt: a shard is not what its reference names, or a sample has no row of rewards.
    """
    rows: list[dict[str, Any]] = []
    graded: list[GradedSample] = []
    for samples_ref, rewards_ref in zip(samples, rewards, strict=True):
        table = read_shard(store, samples_ref, schema=SAMPLES, columns=_SAMPLE_COLUMNS)
        scores = read_shard(
            store, rewards_ref, schema=REWARDS, columns=["sample_id", "reward", "status"]
        )
        by_id = {row["sample_id"]: row for row in scores.to_pylist()}
        shard_rows = table.to_pylist()
        rows += shard_rows
        graded += [_graded(row, by_id, rewards_ref) for row in shard_rows]
    return Experience(rows, graded)


def _graded(
    row: Mapping[str, Any], scores: Mapping[str, Mapping[str, Any]], rewards: ObjectRef
) -> GradedSample:
    score = scores.get(row["sample_id"])
    if score is None:
        raise Corrupt(
            f"{rewards.key} has no row for sample {row['sample_id']}. Expected one per sample of "
            "its rollout shard. Redo the reward stage."
        )
    return GradedSample(
        sample_id=row["sample_id"],
        group_id=row["group_id"],
        status=score["status"],
        reward=score["reward"] if score["status"] == "graded" else None,
        truncated=row["finish_reason"] == "length",
    )


def judge(experience: Experience, config: TrainConfig) -> Verdicts:
    """Returns what the algorithm makes of every sample."""
    algorithm = ALGORITHMS[config.algorithm.kind]
    settings = algorithm.Config.model_validate(config.algorithm.options)
    return algorithm.advantages(experience.graded, config=settings)


def make_updates(
    experience: Experience, verdicts: Sequence[Verdict], *, config: TrainConfig, update_index: int
) -> list[Update]:
    """Returns the optimizer updates of one step, in order; those without samples are left out.

    Groups are divided among minibatches in plan order; every epoch repeats the same division.
    """
    groups: dict[str, list[TrainSample]] = {}
    for row, verdict in zip(experience.rows, verdicts, strict=True):
        members = groups.setdefault(row["group_id"], [])
        if verdict.kept:
            members.append(_train_sample(row, verdict))
    parts = np.array_split(np.arange(len(groups)), config.minibatches)
    members = list(groups.values())
    minibatches = [[sample for index in part for sample in members[index]] for part in parts]
    return [
        Update(samples, learning_rate(config, update_index + index))
        for index, samples in enumerate(minibatches * config.epochs)
        if samples
    ]


def _train_sample(row: Mapping[str, Any], verdict: Verdict) -> TrainSample:
    assert verdict.advantage is not None
    return TrainSample(
        sample_id=row["sample_id"],
        group_id=row["group_id"],
        prompt_token_ids=row["prompt_token_ids"],
        completion_token_ids=row["completion_token_ids"],
        loss_mask=row["completion_mask"],
        rollout_logprobs=[
            0.0 if value is None else value for value in row["rollout_logprobs"]
        ],  # null where the policy did not sample the token; the mask is false there
        advantage=verdict.advantage,
    )


def train_table(
    experience: Experience,
    verdicts: Sequence[Verdict],
    learner_logprobs: Mapping[str, list[float]],
) -> pa.Table:
    """Returns the rows of the train shard, one per sample, in plan order."""
    graded = experience.graded
    columns = {
        "sample_id": [sample.sample_id for sample in graded],
        "group_id": [sample.group_id for sample in graded],
        "advantage": [verdict.advantage for verdict in verdicts],
        "kept": [verdict.kept for verdict in verdicts],
        "reason": [verdict.reason for verdict in verdicts],
        "learner_logprobs": [learner_logprobs.get(sample.sample_id) for sample in graded],
    }
    return pa.table(columns, schema=TRAIN)


def figures(experience: Experience, verdicts: Verdicts) -> Metrics:
    """Returns the counts of one step: what was kept, what was dropped and why."""
    dropped: dict[str, int] = {}
    for verdict in verdicts.verdicts:
        if not verdict.kept:
            reason = verdict.reason or "unnamed"
            dropped[reason] = dropped.get(reason, 0) + 1
    total = max(len(experience.graded), 1)
    rewards = [sample.reward for sample in experience.graded if sample.reward is not None]
    return {
        "samples": float(len(experience.graded)),
        "samples_kept": float(sum(verdict.kept for verdict in verdicts.verdicts)),
        "samples_dropped": float(sum(dropped.values())),
        **{f"dropped_{reason}": float(count) for reason, count in sorted(dropped.items())},
        "groups": float(verdicts.num_groups),
        "zero_std_groups": float(verdicts.num_zero_std_groups),
        "zero_std_share": verdicts.num_zero_std_groups / max(verdicts.num_groups, 1),
        "truncated_share": sum(sample.truncated for sample in experience.graded) / total,
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
    }
