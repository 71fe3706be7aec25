"""What the algorithm makes of stored experience, computed again without an engine, and compared."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from storage.audit_findings import CUT, EXACTLY_ONCE, NO_SILENT_ZERO, REPLAY, Tally
from storage.audit_tables import other_rows
from storage.experience import read_shard
from storage.object_store import ObjectStore
from storage.records import ObjectRef, RecordRef, StageRecord
from storage.schemas import TRAIN
from tasks.train.contract import TrainConfig
from tasks.train.experience import (
    Experience,
    figures,
    judge,
    make_updates,
    read_experience,
    train_table,
)

TOLERANCE = 1e-9
"""On advantages and means: another numpy may add in another order."""

MAX_UPDATES = 100_000
"""Updates of one step that are spelled out; a step of minutes makes a few."""

_JUDGED = ["sample_id", "group_id", "advantage", "kept", "reason"]


def audit_train(
    store: ObjectStore,
    ref: RecordRef,
    record: StageRecord,
    *,
    samples: Sequence[ObjectRef],
    rewards: Sequence[ObjectRef],
    tally: Tally,
) -> None:
    """Says so if advantages, verdicts, rates or figures do not follow from experience and config.

    Args:
        store: holds the shards.
        ref: names the train record.
        record: of the step's train stage, of kind `update`.
        samples: the rollout shards, in order.
        rewards: the shards of their rewards, likewise.
        tally: is told.

    Raises:
        NotFound, Corrupt: a shard is gone, or is not what its reference names.
        ValueError: no such config, or one that would keep an auditor busy for ever.
    """
    config = TrainConfig.model_validate(record.request["config"])
    if config.epochs * config.minibatches > MAX_UPDATES:
        raise ValueError(
            f"{ref.key} asks for {config.epochs} epochs of {config.minibatches} minibatches. "
            f"Expected at most {MAX_UPDATES} updates in a step to be looked at."
        )
    experience = read_experience(store, samples=samples, rewards=rewards)
    judged = judge(experience, config)
    shard = record.outputs["train"]
    stored = read_shard(store, shard, schema=TRAIN)
    again = train_table(experience, judged.verdicts, {}).select(_JUDGED)
    _check_verdicts(stored.select(_JUDGED), again, key=shard.key, tally=tally)
    _check_coverage(stored, experience, key=shard.key, tally=tally)
    index = record.request["update_index"]
    updates = make_updates(experience, judged.verdicts, config=config, update_index=index)
    metrics: dict[str, Any] = {**figures(experience, judged)}
    for name, value in metrics.items():
        _check_figure(ref, record, name, value, promise=REPLAY, tally=tally)
    if updates:
        rate = updates[-1].learning_rate
        _check_figure(ref, record, "learning_rate", rate, promise=CUT, tally=tally)
    tally.counts["schedules"] += 1


def _check_verdicts(stored: pa.Table, again: pa.Table, *, key: str, tally: Tally) -> None:
    """Compares verdicts exactly and advantages within the tolerance, whose use is kept."""

    def is_same(column: str, mine: Any, theirs: Any) -> bool:
        if column != "advantage" or mine is None or theirs is None:
            return mine == theirs
        tally.largest("advantage difference", abs(mine - theirs))
        return math.isclose(mine, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    tally.largest("advantage difference", 0.0)
    others = other_rows(stored, again, is_same=is_same)
    if others:
        more = f" ({len(others)} of {stored.num_rows} rows differ)"
        found = others[0].found + more
        tally.broken(key, expected=others[0].expected, found=found, promise=REPLAY)
    tally.counts["advantages"] += stored.num_rows


def _check_coverage(stored: pa.Table, experience: Experience, *, key: str, tally: Tally) -> None:
    """Checks that each sample stands there once, trained, or dropped for a reason."""
    ids = [row["sample_id"] for row in experience.rows]
    found = stored.column("sample_id").to_pylist()
    tally.expect(key, "sample ids", found, ids, promise=EXACTLY_ONCE)
    statuses = {sample.sample_id: sample.status for sample in experience.graded}
    lengths = {row["sample_id"]: len(row["completion_token_ids"]) for row in experience.rows}
    for row in stored.to_pylist():
        status = statuses.get(row["sample_id"], "graded")
        _check_row(row, status, lengths.get(row["sample_id"], 0), key=key, tally=tally)
        dropped = "kept" if row["kept"] else f"dropped {row['reason']}"
        tally.counts[f"samples {dropped}"] += 1


def _check_row(
    row: Mapping[str, Any], status: str, num_tokens: int, *, key: str, tally: Tally
) -> None:
    name = row["sample_id"]
    if status != "graded" and (row["kept"] or row["advantage"] is not None):
        tally.broken(
            key,
            expected=f"{name} ({status}) in neither baseline nor loss",
            found=f"advantage {row['advantage']}, kept {row['kept']}",
            promise=NO_SILENT_ZERO,
        )
    if not row["kept"] and not row["reason"]:
        expected = f"a reason why {name} was dropped"
        tally.broken(key, expected=expected, found="none", promise=EXACTLY_ONCE)
    learner = row["learner_logprobs"]
    found = None if learner is None else len(learner)
    wanted = num_tokens if row["kept"] else None
    tally.expect(key, f"learner logprobs of {name}", found, wanted, promise=REPLAY)


def _check_figure(
    ref: RecordRef,
    record: StageRecord,
    name: str,
    value: float | None,
    *,
    promise: int,
    tally: Tally,
) -> None:
    stored = record.metrics.get(name)
    if stored is None or value is None:
        same = stored is value
    else:
        same = math.isclose(stored, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if not same:
        tally.expect(ref.key, f"metric {name}", stored, value, promise=promise)
