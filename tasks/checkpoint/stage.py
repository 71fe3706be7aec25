"""The checkpoint stage: checks that a step is closed, then makes it official with one put."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from storage.errors import Corrupt, NotFound
from storage.ledger import put_commit, read_commit, read_record
from storage.object_store import ObjectStore
from storage.records import ObjectRef, PolicyRef, RecordRef, StageRecord, StepCommit
from tasks.checkpoint.contract import CheckpointRequest, CheckpointResult
from tasks.workspace import Workspace

REQUESTS = (CheckpointRequest,)


def run(
    request: CheckpointRequest,
    store: ObjectStore,
    engine: None = None,
    *,
    workspace: Workspace | None = None,
) -> CheckpointResult:
    """Commits one step, or adopts the commit that another attempt made.

    Writes commit.json and nothing else. A second call returns the commit that stands.

    Args:
        request: the plan, the records and the cursor of the step.
        store: where everything that the request names already lies.
        engine: none; the parameter keeps the door alike in every room.
        workspace: unused, likewise.

    Raises:
        Corrupt: a record does not follow from this step's records and its ancestors, or an object
            that it names has another size; the message names the record that has to go.
        NotFound: an object that a record names is not there; likewise.
    """
    scope = request.scope
    records = {ref.stage: read_record(store, ref) for ref in request.records}
    previous = read_commit(store, scope.run, scope.step - 1)[0] if scope.step else None
    _check_inputs(request, records, previous)
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
    stands, digest, ours = put_commit(store, commit)
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


def _check_inputs(
    request: CheckpointRequest, records: dict[str, StageRecord], previous: StepCommit | None
) -> None:
    """Checks that every input is an output of this step's records or of the step before."""
    if request.kind != "train":
        return
    assert previous is not None, "a train step follows a committed one"
    outputs = {
        stage: {name: ref.sha256 for name, ref in record.outputs.items()}
        for stage, record in records.items()
    }
    rollouts = sorted(stage for stage in records if stage.startswith("rollout-"))
    rewards = sorted(stage for stage in records if stage.startswith("reward-"))
    for stage in rollouts:
        body = records[stage].request
        _follows(request, stage, "prompts", body["prompts"], outputs["prompts"]["prompts"])
        _follows(request, stage, "policy", body["policy"], previous.policy_digest)
    for stage in rewards:
        samples = outputs[stage.replace("reward-", "rollout-")]["samples"]
        _follows(request, stage, "samples", records[stage].request["samples"], samples)
    train = records["train"].request
    samples = [outputs[stage]["samples"] for stage in rollouts]
    _follows(request, "train", "samples", train["samples"], samples)
    graded = [outputs[stage]["rewards"] for stage in rewards]
    _follows(request, "train", "rewards", train["rewards"], graded)
    _follows(request, "train", "state_id", train["state_id"], previous.state_id)


def _follows(
    request: CheckpointRequest, stage: str, name: str, found: object, expected: object
) -> None:
    if found != expected:
        raise Corrupt(
            f"Step {request.scope.step} of {request.scope.run} is not closed: the {stage} record "
            f"was made from {name} {found}. Expected {expected}, an output of this step or its "
            "ancestors. Nothing was committed; resume the run to redo the stage."
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
