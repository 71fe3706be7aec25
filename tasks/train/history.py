"""Trainer state from the store: the nearest snapshot, then the committed train stages after it.

Resume, audit and fork are this one path. Nothing here writes to the store.
"""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

from storage.errors import Corrupt, NotFound
from storage.layout import StepScope
from storage.ledger import ancestors, find_record, read_record
from storage.object_store import ObjectStore
from storage.objects import fetch_file
from storage.policies import open_policy
from storage.records import Rebase, SnapshotRef, StageRecord, StepCommit, request_digest
from tasks.errors import Permanent
from tasks.train.contract import TrainConfig, TrainEngine, snapshot_body
from tasks.train.replay import Committed, Settlement, retrain, settle
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What it took to hold a state: steps replayed, what was rebased, what a reader should know."""

    replayed: int = 0
    rebased: Rebase | None = None
    notes: list[str] = field(default_factory=list)


def hold_state(  # noqa: PLR0913 - what to hold, from where, and how exactly
    store: ObjectStore,
    engine: TrainEngine,
    state_id: str,
    *,
    scope: StepScope,
    workspace: Workspace,
    rebase: bool = False,
    tolerance: float = 0.0,
) -> Restored:
    """Makes the engine hold the state that `state_id` names, through skipped steps and forks.

    Does nothing if it holds it already. A snapshot that cannot be read costs time only: an older
    one is taken and more is replayed; without any, genesis is imported again from policy 0. Every
    replayed step must give the committed policy and state, or is rebased (see `settle`). A rebased
    state is not the one of that id: the engine holds it without a name, so that a second call
    restores and says so again.

    Args:
        store: holds the run.
        engine: a trainer; what it held is lost if it was another state.
        state_id: digest of a committed train record.
        scope: the step that wants the state; only commits before it are looked at.
        workspace: snapshot files are cached there.
        rebase: whether other bits under another environment may be rebased.
        tolerance: how far they may be off; see `TrainConfig.rebase_tolerance`.

    Raises:
        Permanent: no such commit, nothing to begin from, or a replay that differs.
        Corrupt: a record or shard is not what its reference names.
    """
    if engine.state_id == state_id:
        return Restored()
    notes: list[str] = []
    pending: list[Committed] = []
    for committed in _walk(store, state_id, scope):
        if _restore(store, engine, committed, workspace=workspace, notes=notes):
            break
        pending.append(committed)
    else:
        raise Permanent(
            f"Run {scope.run} has no readable snapshot at or before step {scope.step - 1}, and "
            f"policy 0 is gone: {'; '.join(notes)}. Restore one of them from a copy of the store."
        )
    logger.info(
        "restoring the trainer: state of step %d, then %d steps", committed.step, len(pending)
    )
    settlement = Settlement(
        store, engine, workspace=workspace, rebase=rebase, tolerance=tolerance, base=committed
    )
    for committed in reversed(pending):
        retrained = retrain(store, engine, committed)
        settle(settlement, committed, retrained, last=committed.state_id == state_id)
    rebased = settlement.rebase_record()
    if rebased is None:
        engine.adopt(state_id)
    if pending:
        notes.append(f"replayed {len(pending)} steps to restore the state")
    return Restored(len(pending), rebased, notes)


def _walk(store: ObjectStore, state_id: str, scope: StepScope) -> Iterator[Committed]:
    """Yields the train stages that lead to the state, newest first, down to genesis."""
    found = False
    if scope.step > 0:
        for commit, _ in ancestors(store, scope.run, scope.step - 1):
            found = found or commit.state_id == state_id
            record = train_record(store, commit) if found else None
            if record is not None:
                yield Committed(commit, record)
    if not found:
        raise Permanent(
            f"No commit of run {scope.run} before step {scope.step} ends in trainer state "
            f"{state_id}. Expected the digest of a committed train record. Resume the run from its "
            "last commit."
        )


def train_record(store: ObjectStore, commit: StepCommit) -> StageRecord | None:
    """Returns the train record of a commit; None for a skipped step and the start of a fork."""
    ref = next((ref for ref in commit.records if ref.stage == "train"), None)
    return read_record(store, ref) if ref else None


def updates_so_far(store: ObjectStore, commit: StepCommit) -> int:
    """Returns the optimizer updates made up to a commit, through skipped steps and forks.

    What schedules count in: the `update_index` of the step after it. Genesis makes none.
    """
    record = train_record(store, commit)
    if record is None:
        older = ancestors(store, commit.run, commit.step)
        records = (train_record(store, found) for found, _ in older)
        record = next((found for found in records if found is not None), None)
    if record is None or record.request["kind"] == "genesis":
        return 0
    config = TrainConfig.model_validate(record.request["config"])
    return record.request["update_index"] + config.epochs * config.minibatches


def find_snapshot(
    store: ObjectStore, commit: StepCommit, record: StageRecord
) -> SnapshotRef | None:
    """Returns the snapshot of the state that a commit ends in: its own, or one made at a stop."""
    if record.snapshot is not None:
        return record.snapshot
    made = stop_snapshot(store, commit)
    return made.snapshot if made else None


def stop_snapshot(store: ObjectStore, commit: StepCommit) -> StageRecord | None:
    """Returns the record of the snapshot that a graceful stop made after a commit, if one did."""
    return find_record(
        store,
        StepScope(run=commit.run, step=commit.step),
        stage="snapshot",
        request_digest=request_digest("snapshot", snapshot_body(commit.state_id)),
    )


def _restore(
    store: ObjectStore,
    engine: TrainEngine,
    committed: Committed,
    *,
    workspace: Workspace,
    notes: list[str],
) -> bool:
    """Restores the state that `committed` ends in from its snapshot, if one can be read."""
    snapshot = find_snapshot(store, committed.commit, committed.record)
    if snapshot is not None and _restore_snapshot(
        store, engine, committed, snapshot, workspace=workspace, notes=notes
    ):
        return True
    if committed.commit.kind != "genesis":
        return False
    return _import_again(store, engine, committed, workspace=workspace, notes=notes)


def _restore_snapshot(
    store: ObjectStore,
    engine: TrainEngine,
    committed: Committed,
    snapshot: SnapshotRef,
    *,
    workspace: Workspace,
    notes: list[str],
) -> bool:
    directory = workspace.scratch / f"snapshot-{committed.state_id[:16]}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        for name, ref in snapshot.files.items():
            (directory / name).symlink_to(fetch_file(store, ref, cache=workspace.cache))
    except (NotFound, Corrupt) as error:
        shutil.rmtree(directory)
        logger.warning("The snapshot of step %d cannot be read: %s", committed.step, error)
        notes.append(f"the snapshot of step {committed.step} cannot be read: {error}")
        return False
    engine.configure(TrainConfig.model_validate(committed.record.request["config"]))
    engine.restore(directory)
    shutil.rmtree(directory)
    try:
        check_state(engine, committed)
    except Corrupt as error:
        # A snapshot made at a stop is sealed by the next commit only: what it is, its state says.
        logger.warning("The snapshot of step %d is of another state: %s", committed.step, error)
        notes.append(f"the snapshot of step {committed.step} is of another state: {error}")
        return False
    return True


def _import_again(
    store: ObjectStore,
    engine: TrainEngine,
    committed: Committed,
    *,
    workspace: Workspace,
    notes: list[str],
) -> bool:
    """Makes genesis again from policy 0: fresh moments, and masters if nothing was rounded."""
    assert committed.record.policy is not None, "a train record names its policy"
    try:
        directory = open_policy(store, committed.record.policy, cache=workspace.cache)
    except (NotFound, Corrupt) as error:
        notes.append(f"policy 0 cannot be read: {error}")
        return False
    engine.configure(TrainConfig.model_validate(committed.record.request["config"]))
    engine.initialise(directory)
    check_state(engine, committed)
    notes.append("genesis was imported again from policy 0")
    return True


def check_state(engine: TrainEngine, committed: Committed) -> None:
    """Checks that the engine holds the state that the record names, where it names one.

    Raises:
        Corrupt: it holds another one.
    """
    expected = committed.record.state_digest
    found = engine.state_digest() if expected else None
    if found != expected:
        raise Corrupt(
            f"The stored state of step {committed.step} of run {committed.commit.run} has digest "
            f"{found}. Expected {expected}, which its train record says. Restore the snapshot from "
            "a copy of the store."
        )
