"""The policies of committed steps as Arrow: how large they are, and whether they are there."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from storage.given_up import given_up
from storage.layout import StepScope
from storage.ledger import read_record, stage_records
from storage.object_store import ObjectStore
from storage.objects import is_there
from storage.records import ObjectRef, SnapshotRef, StageRecord, StepCommit
from storage.tables import READERS, CommittedStep

POLICIES = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("digest", pa.string()),
        ("encoding", pa.string()),
        ("dtype", pa.string()),
        ("num_files", pa.int64()),
        ("bytes", pa.int64()),
        ("files", pa.string()),
        ("has_snapshot", pa.bool_()),
        ("snapshot_ranks", pa.int64()),
        ("snapshot_bytes", pa.int64()),
        ("snapshot_files", pa.string()),
    ]
)
"""One row per commit. `files` and `snapshot_files` are kept, given up (by `gc`), or lost;
`has_snapshot`: training can be continued from this version without replay."""


def policies_table(store: ObjectStore, steps: Sequence[CommittedStep]) -> pa.Table:
    """Returns one row per policy version; looks in the store for every file of it.

    Raises:
        Corrupt: a train record is not what the commit names, or a GcRecord does not parse.
    """
    runs = dict.fromkeys(step.commit.run for step in steps)
    gone = {found.key for run in runs for found in given_up(store, run)}
    commits = [step.commit for step in steps]
    after = {(commit.run, commit.step - 1): commit for commit in commits}

    def row(commit: StepCommit) -> dict[str, Any]:
        return _row(store, commit, after.get((commit.run, commit.step)), gone)

    with ThreadPoolExecutor(READERS, thread_name_prefix="policies") as pool:
        return pa.Table.from_pylist(list(pool.map(row, commits)), schema=POLICIES)


def _row(
    store: ObjectStore, commit: StepCommit, after: StepCommit | None, gone: set[str]
) -> dict[str, Any]:
    policy = commit.policy
    snapshot = _snapshot(store, commit, after)
    files = list(snapshot.files.values()) if snapshot else []
    state = _state(store, files, gone) if snapshot else None
    return {
        "run": commit.run,
        "step": commit.step,
        "version": policy.version,
        "digest": policy.digest,
        "encoding": policy.encoding,
        "dtype": policy.dtype,
        "num_files": len(policy.files),
        "bytes": sum(ref.num_bytes for ref in policy.files),
        "files": _state(store, policy.files, gone),
        "has_snapshot": state == "kept",
        "snapshot_ranks": snapshot.ranks if snapshot else None,
        "snapshot_bytes": sum(ref.num_bytes for ref in files) if snapshot else None,
        "snapshot_files": state,
    }


def _snapshot(
    store: ObjectStore, commit: StepCommit, after: StepCommit | None
) -> SnapshotRef | None:
    """Returns the snapshot of a commit's state: its own, or one made when the run was stopped."""
    own = next((ref for ref in commit.records if ref.stage == "train"), None)
    record = read_record(store, own) if own else None
    if record is None or record.snapshot is None:
        record = _made_at_stop(store, commit, after)
    return record.snapshot if record else None


def _made_at_stop(
    store: ObjectStore, commit: StepCommit, after: StepCommit | None
) -> StageRecord | None:
    """The next commit names it; while there is none, it lies under the newest step."""
    if after is not None:
        named = next((ref for ref in after.records if ref.stage == "snapshot"), None)
        return read_record(store, named) if named else None
    scope = StepScope(run=commit.run, step=commit.step)
    return next(stage_records(store, scope, "snapshot"), None)


def _state(store: ObjectStore, files: Sequence[ObjectRef], gone: set[str]) -> str:
    if any(ref.key in gone for ref in files):
        return "given up"
    return "kept" if all(is_there(store, ref) for ref in files) else "lost"
