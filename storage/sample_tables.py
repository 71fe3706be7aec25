"""Prompts and samples of committed steps as lazy tables over their shards.

A row exists because a commit names its shard: what dead attempts left is never seen.
"""

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from storage.object_store import ObjectStore
from storage.records import EvalRecord, RecordRef, RunRecord, StepCommit
from storage.schemas import PROMPTS, REWARDS, SAMPLES, TRAIN
from storage.shard_tables import Shard, ShardTable, Source, Unit
from storage.tables import CommittedStep

_ROLLOUT = Source("rollout", {name: name for name in SAMPLES.names})
_REWARD = Source(
    "reward",
    {"reward": "reward", "status": "status", "reason": "reward_reason", "parts": "parts"},
    join="sample_id",
    one_to_one=True,
)
_TRAIN = Source(
    "train",
    {
        "advantage": "advantage",
        "kept": "kept",
        "reason": "drop_reason",
        "learner_logprobs": "learner_logprobs",
    },
    join="sample_id",
    one_to_one=True,
)
_ASKED = Source(
    "prompts",
    {name: name for name in ("prompt_id", "domain", "answer", "extra")},
    join="group_id",
)
_PROMPTS = Source("prompts", {name: name for name in PROMPTS.names})
_POOL = Source("prompts", {name: name for name in PROMPTS.names if name != "group_id"})
_SAMPLE_SOURCES = (_ROLLOUT, _REWARD, _TRAIN, _ASKED)
_EVAL_SOURCES = (_ROLLOUT, _REWARD, _ASKED)

_STEP_KEYS: dict[str, pa.DataType] = {"run": pa.string(), "step": pa.int64()}
_EVAL_KEYS: dict[str, pa.DataType] = {
    "run": pa.string(),
    "version": pa.int64(),
    "suite": pa.string(),
}
_POOL_KEYS: dict[str, pa.DataType] = {"run": pa.string(), "split": pa.string()}
_SHARD = {"shard": pa.int32()}


def _schema(keys: Mapping[str, pa.DataType], sources: Iterable[Source]) -> pa.Schema:
    declared = {"rollout": SAMPLES, "reward": REWARDS, "train": TRAIN, "prompts": PROMPTS}
    fields = [pa.field(name, kind) for name, kind in keys.items()]
    for source in sources:
        schema = declared[source.name]
        fields += [pa.field(name, schema.field(at).type) for at, name in source.columns.items()]
    return pa.schema(fields)


SAMPLE_ROWS = _schema(_STEP_KEYS | _SHARD, _SAMPLE_SOURCES)
"""One row per sample: what sampler, graders and algorithm said of it, and what was asked."""
PROMPT_ROWS = _schema(_STEP_KEYS, (_PROMPTS,))
"""One row per prompt group of a step, skipped steps included."""
EVAL_SAMPLE_ROWS = _schema(_EVAL_KEYS | _SHARD, _EVAL_SOURCES)
"""One row per sample of an evaluation, which nothing was trained on."""
POOL_ROWS = _schema(_POOL_KEYS, (_POOL,))
"""One row per prompt that a run can draw (`train`) or be measured by (`held_out`)."""


def samples_table(store: ObjectStore, steps: Sequence[CommittedStep]) -> ShardTable:
    """Returns the samples of these steps; nothing is read yet."""
    units = [_step_unit(step.commit) for step in steps]
    units = [unit for unit in units if "rollout" in unit.shards]
    return ShardTable(store, SAMPLE_ROWS, _SAMPLE_SOURCES, units)


def prompts_table(store: ObjectStore, steps: Sequence[CommittedStep]) -> ShardTable:
    """Returns the prompt groups of these steps; nothing is read yet."""
    units = [_step_unit(step.commit) for step in steps]
    units = [unit for unit in units if "prompts" in unit.shards]
    return ShardTable(store, PROMPT_ROWS, (_PROMPTS,), units)


def eval_samples_table(
    store: ObjectStore, records: Sequence[RunRecord], evals: Sequence[EvalRecord]
) -> ShardTable:
    """Returns the samples of these evaluations of these runs; nothing is read yet."""
    held_out = {record.run: Shard(0, record.prompts.held_out) for record in records}
    units = [
        Unit(
            keys={"run": found.run, "version": found.policy_version, "suite": found.suite},
            shards={**_shards(found.records), "prompts": [held_out[found.run]]},
        )
        for found in evals
    ]
    return ShardTable(store, EVAL_SAMPLE_ROWS, _EVAL_SOURCES, units)


def pool_table(store: ObjectStore, records: Sequence[RunRecord]) -> ShardTable:
    """Returns the prompts that these runs draw from and are measured by; nothing is read yet."""
    units = [
        Unit({"run": record.run, "split": split}, {"prompts": [Shard(0, ref)]})
        for record in records
        for split, ref in (("train", record.prompts.train), ("held_out", record.prompts.held_out))
    ]
    return ShardTable(store, POOL_ROWS, (_POOL,), units)


def _step_unit(commit: StepCommit) -> Unit:
    return Unit({"run": commit.run, "step": commit.step}, _shards(commit.records))


def _shards(records: Sequence[RecordRef]) -> dict[str, list[Shard]]:
    outputs = {"prompts": "prompts", "rollout": "samples", "reward": "rewards", "train": "train"}
    found: dict[str, list[Shard]] = {}
    for ref in records:
        stage, _, number = ref.stage.partition("-")
        if stage in outputs:
            found.setdefault(stage, []).append(Shard(int(number or 0), ref, outputs[stage]))
    return {stage: sorted(shards, key=lambda shard: shard.index) for stage, shards in found.items()}
