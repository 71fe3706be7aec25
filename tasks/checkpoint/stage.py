"""The checkpoint stage: checks that a step is closed, then makes it official with one put."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from storage.errors import Corrupt, NotFound
from storage.ledger import put_commit, read_commit, read_plan, read_record, read_run
from storage.object_store import ObjectStore
from storage.records import ObjectRef, Plan, PolicyRef, RecordRef, StageRecord, StepCommit
from storage.signing import Signer, sign_commit
from tasks.checkpoint.contract import CheckpointRequest, CheckpointResult
from tasks.workspace import Workspace

REQUESTS = (CheckpointRequest,)


def run(
    request: CheckpointRequest,
    store: ObjectStore,
    engine: Signer | None = None,
    *,
    workspace: Workspace | None = None,
) -> CheckpointResult:
    """Commits one step, or adopts the commit that another attempt made.

    Writes commit.json and nothing else. A second call returns the commit that stands.

    Args:
        request: the plan, the records and the cursor of the step.
        store: where everything that the request names already lies.
        engine: the key that signs the commit; None leaves it unsigned.
        workspace: unused; the parameter keeps the door alike in every room.

    Raises:
        Corrupt: the plan is not this step's, a record does not follow from the plan, this step's
            records and its ancestors, a fork does not begin where its parent stands, or an object
            that a record names has another size; the message says what to do.
        NotFound: an object that a record names is not there; likewise.
    """
    scope = request.scope
    records = {ref.stage: read_record(store, ref) for ref in request.records}
    first = request.kind in ("genesis", "fork")
    before = None if first else read_commit(store, scope.run, scope.step - 1)
    previous = before[0] if before else None
    plan = _check_plan(request, store, before)
    if request.kind == "fork":
        previous = _parent(request, store)
    elif previous is not None:
        _check_inputs(request, records, plan, previous)
    _check_outputs(request, store, records)
    train = records.get("train")
    policy, state_id = _resulting_policy(request, train, previous)
    commit = StepCommit(
        run=scope.run,
        step=scope.step,
        kind=request.kind,
        plan=request.plan,
        records=request.records,
        policy_version=policy.version,
        policy_digest=policy.digest,
        policy=policy,
        state_id=state_id,
        cursor=request.cursor,
        metrics=request.metrics,
        previous=request.previous,
        parent=request.parent,
        rebased=train.rebased if train else None,
        attempt=uuid.uuid4().hex,
        committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    stands, digest, ours = put_commit(store, sign_commit(commit, engine) if engine else commit)
    return CheckpointResult(commit=stands, digest=digest, ours=ours)


def _resulting_policy(
    request: CheckpointRequest, train: StageRecord | None, previous: StepCommit | None
) -> tuple[PolicyRef, str]:
    if train is not None:
        assert train.policy is not None, "a train record names its policy"
        state_id = next(ref.sha256 for ref in request.records if ref.stage == "train")
        return train.policy, state_id
    assert previous is not None, "a skipped step and a fork follow a committed one"
    # The version counts commits, also where one changed nothing.
    policy = previous.policy.model_copy(update={"version": request.scope.step})
    return policy, previous.state_id


def _parent(request: CheckpointRequest, store: ObjectStore) -> StepCommit:
    """Returns the commit that a fork leaves from, if run.json names it and it is what it was."""
    parent = request.parent
    assert parent is not None, "a fork names its parent"
    named = read_run(store, request.scope.run)[0].parent
    _follows(request, "the fork", "parent", parent, named)
    commit, digest = read_commit(store, parent.run, parent.step)
    _follows(request, "the fork", "parent's commit", digest, parent.sha256)
    _follows(request, "the fork", "cursor", request.cursor, commit.cursor)
    return commit


def _check_plan(
    request: CheckpointRequest, store: ObjectStore, previous: tuple[StepCommit, str] | None
) -> Plan:
    """Returns the plan if it is one of this step, made on the history that stands."""
    scope = request.scope
    plan = read_plan(store, request.plan)
    before = previous[1] if previous else read_run(store, scope.run)[1]
    _follows(request, "the plan", "run", plan.run, scope.run)
    _follows(request, "the plan", "step", plan.step, scope.step)
    _follows(request, "the plan", "previous commit", plan.previous, before)
    return plan


def _check_inputs(
    request: CheckpointRequest, records: dict[str, StageRecord], plan: Plan, previous: StepCommit
) -> None:
    """Checks that the plan's records are there, made from one another and from the step before.

    A snapshot record beside them is of the state that the step before ended in.
    """
    rollouts = [f"rollout-{shard.index:04d}" for shard in plan.shards]
    rewards = [f"reward-{shard.index:04d}" for shard in plan.shards]
    trained = ["train"] if request.kind == "train" else []
    found = sorted(ref.stage for ref in request.records if ref.stage != "snapshot")
    _follows(
        request, "the step", "stages", found, sorted(["prompts", *rollouts, *rewards, *trained])
    )
    _follows(request, "the plan", "kind", plan.kind, request.kind)
    drawn = next(ref for ref in request.records if ref.stage == "prompts")
    _follows(request, "the plan", "prompts record", drawn, plan.prompts)
    if "snapshot" in records:
        saved = records["snapshot"].request.get("state_id")
        _follows(request, "snapshot", "state_id", saved, previous.state_id)
    prompts = _output(records["prompts"], "prompts")
    samples = [_output(records[stage], "samples") for stage in rollouts]
    graded = [_output(records[stage], "rewards") for stage in rewards]
    expected: dict[str, dict[str, Any]] = {}
    for shard, stage in zip(plan.shards, rollouts, strict=True):
        rows = [shard.start, shard.stop]
        expected[stage] = {"prompts": prompts, "policy": previous.policy_digest, "rows": rows}
    for stage, sampled in zip(rewards, samples, strict=True):
        expected[stage] = {"samples": sampled, "prompts": prompts}
    if request.kind == "train":
        expected["train"] = {
            "samples": samples,
            "rewards": graded,
            "policy": previous.policy_digest,
            "state_id": previous.state_id,
        }
    for stage, fields in expected.items():
        for name, value in fields.items():
            _follows(request, stage, name, records[stage].request.get(name), value)


def _output(record: StageRecord, name: str) -> str | None:
    ref = record.outputs.get(name)
    return ref.sha256 if ref else None


def _follows(
    request: CheckpointRequest, stage: str, name: str, found: object, expected: object
) -> None:
    if found != expected:
        raise Corrupt(
            f"Step {request.scope.step} of {request.scope.run} is not closed: {name} of "
            f"{stage} is {found}. Expected {expected}, as plan {request.plan.key} and the step "
            "before say. Nothing was committed; commit the records that this plan's "
            "stages return."
        )


def _check_outputs(
    request: CheckpointRequest, store: ObjectStore, records: dict[str, StageRecord]
) -> None:
    named = {
        ref.key: (ref, made) for made in request.records for ref in _objects(records[made.stage])
    }
    with ThreadPoolExecutor(max_workers=8) as threads:
        sizes = threads.map(lambda key: _size_or_none(store, key), named)
        for found, (ref, made) in zip(sizes, named.values(), strict=True):
            if found != ref.num_bytes:
                raise _lost(request, store, ref, made, found)


def _objects(record: StageRecord) -> list[ObjectRef]:
    policy = [*record.policy.files, record.policy.probe] if record.policy else []
    snapshot = list(record.snapshot.files.values()) if record.snapshot else []
    return [*record.outputs.values(), *policy, *snapshot]


def _size_or_none(store: ObjectStore, key: str) -> int | None:
    try:
        return store.size(key)
    except NotFound:
        return None


def _lost(
    request: CheckpointRequest,
    store: ObjectStore,
    ref: ObjectRef,
    made: RecordRef,
    found: int | None,
) -> NotFound | Corrupt:
    """Returns the error for an object that a record names and that is missing or cut."""
    kind = NotFound if found is None else Corrupt
    what = "is not in the store" if found is None else f"has {found} bytes"
    return kind(
        f"{ref.key} {what}. Expected {ref.num_bytes} bytes, as the {made.stage} record "
        f"{made.key} says. {_cure(request, store)}"
    )


def _cure(request: CheckpointRequest, store: ObjectStore) -> str:
    scope = request.scope
    try:
        read_commit(store, scope.run, scope.step)
    except NotFound:
        return (
            f"Step {scope.step} is uncommitted, and resuming alone finds the record again. Restore "
            f"the object from a copy, or do the step's work again: `rollbook resume {scope.run} "
            f'--redo --reason "lost object"`.'
        )
    return (
        f"Another attempt committed step {scope.step} meanwhile: restore the object from a copy "
        "of the store and delete nothing."
    )
