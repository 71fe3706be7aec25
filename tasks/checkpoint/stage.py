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
            records and its ancestors, or an object
            that it names has another size; the message names the record that has to go.
        NotFound: an object that a record names is not there; likewise.
    """
    scope = request.scope
    records = {ref.stage: read_record(store, ref) for ref in request.records}
    before = read_commit(store, scope.run, scope.step - 1) if scope.step else None
    previous = before[0] if before else None
    plan = _check_plan(request, store, before)
    if request.kind == "train":
        assert previous is not None, "a train step follows a committed one"
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
    assert previous is not None, "a skipped step follows a committed one"
    return previous.policy, previous.state_id


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
    """Checks that the plan's records are there, made from one another and from the step before."""
    rollouts = [f"rollout-{shard.index:04d}" for shard in plan.shards]
    rewards = [f"reward-{shard.index:04d}" for shard in plan.shards]
    found = sorted(ref.stage for ref in request.records)
    _follows(
        request, "the step", "stages", found, sorted(["prompts", *rollouts, *rewards, "train"])
    )
    drawn = next(ref for ref in request.records if ref.stage == "prompts")
    _follows(request, "the plan", "prompts record", drawn, plan.prompts)
    prompts = _output(records["prompts"], "prompts")
    samples = [_output(records[stage], "samples") for stage in rollouts]
    graded = [_output(records[stage], "rewards") for stage in rewards]
    expected: dict[str, dict[str, Any]] = {}
    for shard, stage in zip(plan.shards, rollouts, strict=True):
        rows = [shard.start, shard.stop]
        expected[stage] = {"prompts": prompts, "policy": previous.policy_digest, "rows": rows}
    for stage, sampled in zip(rewards, samples, strict=True):
        expected[stage] = {"samples": sampled, "prompts": prompts}
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
        f"{made.key} says. {_cure(request, store, made)}"
    )


def _cure(request: CheckpointRequest, store: ObjectStore, made: RecordRef) -> str:
    scope = request.scope
    try:
        read_commit(store, scope.run, scope.step)
    except NotFound:
        # A plan names its prompts record by digest, so a new prompts record needs a new plan.
        keys = f"{request.plan.key} and {made.key}" if made.stage == "prompts" else made.key
        return (
            f"Step {scope.step} and this record are uncommitted, and resuming alone finds the "
            f"record again. Restore the object from a copy, or delete {keys} from {store.uri} "
            "and resume the run, which redoes the stage. Rollbook deletes no record by itself."
        )
    return (
        f"Another attempt committed step {scope.step} meanwhile: restore the object from a copy "
        "of the store and delete nothing."
    )
