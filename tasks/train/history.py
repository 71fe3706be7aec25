"""Trainer state from the store: the nearest snapshot, then the committed train stages after it.

Resume, audit and fork are this one path. Nothing here writes to the store.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from storage.layout import StepScope
from storage.ledger import read_commit, read_record
from storage.object_store import ObjectStore
from storage.objects import fetch_file
from storage.policies import policy_digest
from storage.records import ObjectRef, SnapshotRef, StageRecord, StepCommit
from tasks.errors import Permanent
from tasks.train.contract import TrainConfig, TrainEngine
from tasks.train.experience import judge, make_updates, read_experience
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """A committed train stage: its record, the digest of it, and the experience it was made of."""

    step: int
    state_id: str
    record: StageRecord
    samples: list[ObjectRef]
    rewards: list[ObjectRef]


def hold_state(
    store: ObjectStore,
    engine: TrainEngine,
    state_id: str,
    *,
    scope: StepScope,
    workspace: Workspace,
) -> int:
    """Makes the engine hold the state that `state_id` names; returns how many steps it replayed.

    Does nothing if it holds it already. Every replayed step must give the committed policy.

    Args:
        store: holds the run.
        engine: a trainer; what it held is lost if it was another state.
        state_id: digest of a committed train record.
        scope: the step that wants the state; only commits before it are looked at.
        workspace: snapshot files are cached there.

    Raises:
        Permanent: no such commit, no snapshot at or before it, or a replay that differs.
        Corrupt: a snapshot, record or shard is not what its reference names.
    """
    if engine.state_id == state_id:
        return 0
    snapshot, replayed = _find(store, state_id, scope)
    logger.info(
        "restoring the trainer: snapshot of step %d, then %d steps", snapshot.step, len(replayed)
    )
    engine.configure(_config(snapshot.record))
    assert snapshot.record.snapshot is not None
    directory = workspace.scratch / f"snapshot-{snapshot.state_id[:16]}"
    _fetch(store, snapshot.record.snapshot, directory, cache=workspace.cache)
    engine.restore(directory)
    shutil.rmtree(directory)
    for committed in replayed:
        _replay(store, engine, committed, workspace=workspace)
    engine.adopt(state_id)
    return len(replayed)


def _find(store: ObjectStore, state_id: str, scope: StepScope) -> tuple[Committed, list[Committed]]:
    """Walks back from the state to the nearest snapshot; returns it and what follows, in order."""
    after: list[Committed] = []
    found = False
    for step in range(scope.step - 1, -1, -1):
        commit, _ = read_commit(store, scope.run, step)
        committed = _committed(store, commit)
        if committed is None or not (found or committed.state_id == state_id):
            continue
        found = True
        if committed.record.snapshot is not None:
            return committed, after[::-1]
        after.append(committed)
    if found:
        raise Permanent(
            f"Run {scope.run} has no snapshot at or before step {scope.step - 1}. Expected at "
            "least the one of genesis. Restore it from a copy of the store."
        )
    raise Permanent(
        f"No commit of run {scope.run} before step {scope.step} ends in trainer state {state_id}. "
        "Expected the digest of a committed train record. Resume the run from its last commit."
    )


def _committed(store: ObjectStore, commit: StepCommit) -> Committed | None:
    """Returns the train stage of a commit; None for a skipped step, whose state is the last."""
    refs = {ref.stage: ref for ref in commit.records}
    if "train" not in refs:
        return None
    shards = sorted(stage.removeprefix("rollout-") for stage in refs if "rollout-" in stage)
    return Committed(
        step=commit.step,
        state_id=refs["train"].sha256,
        record=read_record(store, refs["train"]),
        samples=[read_record(store, refs[f"rollout-{n}"]).outputs["samples"] for n in shards],
        rewards=[read_record(store, refs[f"reward-{n}"]).outputs["rewards"] for n in shards],
    )


def _config(record: StageRecord) -> TrainConfig:
    return TrainConfig.model_validate(record.request["config"])


def _fetch(store: ObjectStore, snapshot: SnapshotRef, directory: Path, *, cache: Path) -> None:
    """Puts the snapshot's files, each checked against its digest, into `directory`."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, ref in snapshot.files.items():
        (directory / name).symlink_to(fetch_file(store, ref, cache=cache))


def _replay(
    store: ObjectStore, engine: TrainEngine, committed: Committed, *, workspace: Workspace
) -> None:
    config = _config(committed.record)
    engine.configure(config)
    experience = read_experience(store, samples=committed.samples, rewards=committed.rewards)
    updates = make_updates(
        experience,
        judge(experience, config).verdicts,
        config=config,
        update_index=committed.record.request["update_index"],
    )
    if updates:
        engine.update(updates, temperature=committed.record.request["temperature"])
    _check_policy(engine, committed, config=config, workspace=workspace)


def _check_policy(
    engine: TrainEngine, committed: Committed, *, config: TrainConfig, workspace: Workspace
) -> None:
    assert committed.record.policy is not None
    directory = workspace.scratch / "replayed-policy"
    directory.mkdir(parents=True)
    engine.save_policy(directory, max_file_bytes=config.policy_file_bytes)
    found, expected = policy_digest(directory), committed.record.policy.digest
    shutil.rmtree(directory)
    if found != expected:
        raise Permanent(
            f"Replaying step {committed.step} gave policy {found}. Expected the committed "
            f"{expected}: this machine or these library versions compute other bits than the "
            f"record's environment ({committed.record.environment}). Resume there, or from a "
            "step with a snapshot."
        )
