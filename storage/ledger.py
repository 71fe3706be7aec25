"""Runs, plans, stage records and commits: what is put once and stands, and the chain of it.

Digests are over stored bytes. Who is alive is no business of the ledger.
"""

import logging
import re
from collections.abc import Iterator
from typing import TypeVar

from storage.errors import AlreadyExists, CommitConflict, Corrupt, NotFound
from storage.layout import (
    EvalScope,
    StepScope,
    check_run_name,
    commit_key,
    eval_key,
    evals_prefix,
    is_eval_key,
    plan_key,
    plan_revision_of_key,
    plans_prefix,
    record_key,
    record_prefix,
    request_digest_of_key,
    run_key,
    runs_prefix,
    step_of_commit_key,
    step_of_key,
    steps_prefix,
)
from storage.object_store import ObjectStore
from storage.objects import exists, read_object
from storage.records import (
    EvalRecord,
    ObjectRef,
    Plan,
    Record,
    RecordRef,
    RunRecord,
    StageRecord,
    StepCommit,
    request_digest,
    sha256_hex,
    why_invalid,
)

_Record = TypeVar("_Record", bound=Record)
_log = logging.getLogger(__name__)


def create_run(store: ObjectStore, record: RunRecord) -> str:
    """Puts run.json and returns its digest. A second call with an equal record changes nothing.

    Raises:
        AlreadyExists: a run of that name is there; `resume` continues it.
        ValueError: the name cannot name a run.
    """
    payload = record.to_bytes()
    try:
        store.put_if_absent(run_key(check_run_name(record.run)), payload)
    except AlreadyExists as error:
        raise AlreadyExists(
            f"Run {record.run!r} exists in {store.uri}. Continue it with `rollbook resume "
            f"{record.run}`, or launch under another --run name."
        ) from error
    return sha256_hex(payload)


def read_run(store: ObjectStore, run: str) -> tuple[RunRecord, str]:
    """Returns a run's record and the digest of its bytes.

    Raises:
        NotFound: no such run.
        Corrupt: it does not parse, or is another run's.
    """
    try:
        payload = store.get(run_key(check_run_name(run)))
    except NotFound as error:
        known = ", ".join(list_runs(store)) or "none"
        raise NotFound(
            f"There is no run {run!r} in {store.uri}. Expected one of its runs ({known}), or start "
            "one with `rollbook launch`."
        ) from error
    record = _parse(RunRecord, payload, run_key(run))
    _expect(record.run == run, run_key(run), f"run {run!r}", f"run {record.run!r}")
    return record, sha256_hex(payload)


def list_runs(store: ObjectStore) -> list[str]:
    """Returns the names of all runs that have a run.json, sorted."""
    return [run for run in store.folders(runs_prefix()) if exists(store, run_key(run))]


def first_step(record: RunRecord) -> int:
    """Returns the step of a run's first commit: 0, or for a fork the step that it left from."""
    return record.parent.step if record.parent else 0


def head(store: ObjectStore, run: str) -> tuple[StepCommit, str] | None:
    """Returns the newest commit of a run and its digest, or None before the first.

    By step number, never by time: a search over commit keys, then a look at what lies after the
    one that was found. Half-written steps do not count. The search looks at few commits: a hole
    that it does not come by stays unnoticed here. `commits` finds every hole and change.

    Right beside a controller that commits: what it adds between two looks is no break.

    Raises:
        Corrupt: a commit lies after the one that the search found, and the one between is missing.
    """
    first = _first_step(store, run)
    while True:
        newest = _newest_step(store, run, first)
        begun, later = _steps_after(store, run, newest, first=first)
        if later is None:
            break
        if not exists(store, commit_key(run, newest + 1)):
            raise Corrupt(
                f"{later} exists in {store.uri}, but the commit of step {newest + 1} does not. "
                "Expected one unbroken chain: restore the missing commit from a copy."
            )
    for step in sorted(begun - {newest}):
        # The step after the head is what every kill leaves, and what a controller works on; one
        # further on is no work of ours.
        level = logging.DEBUG if step == newest + 1 else logging.WARNING
        _log.log(level, "Step %d of run %s was begun and is not committed.", step, run)
    return None if newest < first else read_commit(store, run, newest)


def _steps_after(
    store: ObjectStore, run: str, newest: int, *, first: int
) -> tuple[set[int], str | None]:
    """Returns the steps that have objects after the commit of `newest`, and a commit among them."""
    after = commit_key(run, newest) if newest >= first else ""
    begun: set[int] = set()
    for listed in store.list(steps_prefix(run), start_after=after):
        step = _step_or_none(listed.key)
        if step is None:
            _log.warning("%s belongs to no step of run %s and is ignored.", listed.key, run)
            continue
        begun.add(step)
        if step_of_commit_key(listed.key) is not None:
            return begun, listed.key
    return begun, None


def read_commit(store: ObjectStore, run: str, step: int) -> tuple[StepCommit, str]:
    """Returns the commit of a step and the digest of its bytes.

    Raises:
        NotFound: the step is not committed.
        Corrupt: it does not parse, or is another step's.
    """
    key = commit_key(run, step)
    payload = store.get(key)
    commit = _parse(StepCommit, payload, key)
    found = f"step {commit.step} of run {commit.run!r}"
    _expect((commit.run, commit.step) == (run, step), key, f"step {step} of run {run!r}", found)
    return commit, sha256_hex(payload)


def commits(
    store: ObjectStore, run: str, *, start: int | None = None
) -> Iterator[tuple[StepCommit, str]]:
    """Yields the commits from step `start` to the head, each checked against the one before.

    Without `start` from the run's first one: a fork's own commits, not those of its parent.

    Raises:
        NotFound: no such run, or the step before `start` is not committed.
        Corrupt: the chain breaks or has a hole; the message names the step.
    """
    record, digest = read_run(store, run)
    first = first_step(record)
    start = first if start is None else max(start, first)
    expected = digest if start == first else read_commit(store, run, start - 1)[1]
    newest = head(store, run)
    for step in range(start, newest[0].step + 1 if newest else 0):
        commit, digest = _commit_below_head(store, run, step)
        if commit.previous != expected:
            raise Corrupt(
                f"The chain of run {run!r} breaks at step {step}: its commit names "
                f"{commit.previous} as the one before, whose digest is {expected}. One of the two "
                "was changed."
            )
        yield commit, digest
        expected = digest


def ancestors(
    store: ObjectStore, run: str, step: int, *, expected: str | None = None
) -> Iterator[tuple[StepCommit, str]]:
    """Yields the commit of `step` and all before it, newest first, through forks to genesis.

    A fork's first commit is followed by the commit of its parent that it names, of the same step.

    Args:
        store: holds the run and its parents.
        run: where to begin.
        step: likewise.
        expected: digest of the first commit, if the caller knows it.

    Raises:
        NotFound: the step is not committed.
        Corrupt: a commit is not the one that the one after it names, or is gone.
    """
    commit, digest = read_commit(store, run, step)
    while True:
        if expected is not None and digest != expected:
            key = commit_key(commit.run, commit.step)
            raise Corrupt(
                f"The chain of run {run!r} breaks at {key}: its digest is {digest}, and the commit "
                f"after it names {expected}. One of the two was changed."
            )
        yield commit, digest
        if commit.kind == "genesis":
            return
        if commit.parent is not None:
            run, expected = commit.parent.run, commit.parent.sha256
            commit, digest = _commit_below_head(store, run, commit.parent.step)
        else:
            expected = commit.previous
            commit, digest = _commit_below_head(store, run, commit.step - 1)


def find_record(
    store: ObjectStore, scope: StepScope | EvalScope, *, stage: str, request_digest: str
) -> StageRecord | None:
    """Returns the record of that request, or None if the work is still to do.

    `stage` carries the shard where there are several: `rollout-0003`.

    Raises:
        Corrupt: what lies there is not the record of that request.
    """
    key = record_key(scope, stage, request_digest)
    payload = _get_or_none(store, key)
    if payload is None:
        return None
    record = _parse(StageRecord, payload, key)
    _check_request(record, key)
    _expect(record.request_digest == request_digest, key, request_digest, record.request_digest)
    _expect(record.stage == stage, key, f"stage {stage}", f"stage {record.stage}")
    return record


def stage_records(
    store: ObjectStore, scope: StepScope | EvalScope, stage: str
) -> Iterator[StageRecord]:
    """Yields every record of a stage in a step or evaluation, one per request.

    Raises:
        Corrupt: what lies there is not the record of its request.
    """
    for listed in store.list(record_prefix(scope, stage)):
        digest = request_digest_of_key(listed.key)
        record = find_record(store, scope, stage=stage, request_digest=digest)
        if record is not None:
            yield record


def put_record(
    store: ObjectStore, scope: StepScope | EvalScope, record: StageRecord
) -> tuple[StageRecord, RecordRef]:
    """Puts a stage record after its data and returns the one that stands: the winner's.

    Raises:
        ValueError: `record.request` is not what `record.request_digest` is the digest of.
        CommitUnknown: neither the put nor the re-read was answered.
    """
    if _request_digest(record) != record.request_digest:
        raise ValueError(
            f"Record of {record.stage} names request digest {record.request_digest}, but its "
            f"request has {_request_digest(record)}. Store the body that the digest was taken of."
        )
    key = record_key(scope, record.stage, record.request_digest)
    standing, digest, _ = _adopt(store, key, record)
    return standing, _record_ref(standing, key, digest)


def record_ref(
    scope: StepScope | EvalScope, record: StageRecord, *, store: ObjectStore
) -> RecordRef:
    """Returns the reference to a stored record; the digest is of the bytes that are stored.

    Raises:
        NotFound: it was not put.
    """
    key = record_key(scope, record.stage, record.request_digest)
    return _record_ref(record, key, sha256_hex(store.get(key)))


def read_record(store: ObjectStore, ref: RecordRef) -> StageRecord:
    """Returns the record that `ref` names.

    Raises:
        NotFound: it is gone.
        Corrupt: other bytes than `ref` names, or another request.
    """
    payload = store.get(ref.key)
    _expect(sha256_hex(payload) == ref.sha256, ref.key, ref.sha256, sha256_hex(payload))
    record = _parse(StageRecord, payload, ref.key)
    _check_request(record, ref.key)
    return record


def adopt_plan(store: ObjectStore, plan: Plan) -> tuple[Plan, ObjectRef]:
    """Puts a plan, or returns the one that another controller put under that revision."""
    key = plan_key(plan.run, plan.step, plan.revision)
    standing, digest, _ = _adopt(store, key, plan)
    return standing, ObjectRef(key=key, sha256=digest, num_bytes=len(store.get(key)))


def current_plan(store: ObjectStore, run: str, step: int) -> tuple[Plan, ObjectRef] | None:
    """Returns the plan of a step with the highest revision, or None."""
    listed = store.list(plans_prefix(run, step))
    revisions = [plan_revision_of_key(entry.key) for entry in listed]
    found = [revision for revision in revisions if revision is not None]
    return _read_plan(store, plan_key(run, step, max(found))) if found else None


def read_plan(store: ObjectStore, ref: ObjectRef) -> Plan:
    """Returns the plan that a commit names.

    Raises:
        NotFound: it is gone.
        Corrupt: other bytes than `ref` names.
    """
    return _parse(Plan, read_object(store, ref), ref.key)


def put_commit(store: ObjectStore, commit: StepCommit) -> tuple[StepCommit, str, bool]:
    """Makes the step exist; returns the commit that stands, its digest, and whether it is ours.

    Raises:
        CommitConflict: `commit.previous` is not the digest of what lies before; reload.
        CommitUnknown: neither the put nor the re-read was answered: read, then decide.
    """
    before = _previous_digest(store, commit)
    if before != commit.previous:
        raise CommitConflict(
            f"Step {commit.step} of run {commit.run!r} was built on {commit.previous}, but before "
            f"it stands {before}. Read the head again and continue from there."
        )
    return _adopt(store, commit_key(commit.run, commit.step), commit)


def put_eval(store: ObjectStore, record: EvalRecord) -> EvalRecord:
    """Puts an evaluation and returns the one that stands."""
    scope = EvalScope(run=record.run, version=record.policy_version, suite=record.suite)
    return _adopt(store, eval_key(scope), record)[0]


def read_evals(store: ObjectStore, run: str) -> list[EvalRecord]:
    """Returns all evaluations of a run by policy version, then suite; not those of its parent."""
    keys = [entry.key for entry in store.list(evals_prefix(run))]
    return [_parse(EvalRecord, store.get(key), key) for key in keys if is_eval_key(key)]


def lineage(store: ObjectStore, run: str) -> list[RunRecord]:
    """Returns the run's record and those of the runs that it was forked from, itself first.

    Raises:
        NotFound: one of them has no run.json.
        Corrupt: they go round in a circle, or one is not what it should be.
    """
    found: list[RunRecord] = []
    while True:
        record, _ = read_run(store, run)
        if any(record.run == other.run for other in found):
            raise Corrupt(
                f"Run {record.run!r} descends from itself: {run_key(record.run)} names a parent "
                "that leads back to it. Restore it from a copy of the store."
            )
        found.append(record)
        if record.parent is None:
            return found
        run = record.parent.run


def _adopt(store: ObjectStore, key: str, record: _Record) -> tuple[_Record, str, bool]:
    payload = record.to_bytes()
    try:
        store.put_if_absent(key, payload)
    except AlreadyExists:
        payload = store.get(key)
        return _parse(type(record), payload, key), sha256_hex(payload), False
    return record, sha256_hex(payload), True


def _read_plan(store: ObjectStore, key: str) -> tuple[Plan, ObjectRef]:
    payload = store.get(key)
    ref = ObjectRef(key=key, sha256=sha256_hex(payload), num_bytes=len(payload))
    return _parse(Plan, payload, key), ref


def _first_step(store: ObjectStore, run: str) -> int:
    try:
        return first_step(read_run(store, run)[0])
    except NotFound:
        return 0


def _newest_step(store: ObjectStore, run: str, first: int) -> int:
    """Doubles until a commit is missing, then halves: about 2 log2(steps) look-ups."""
    low, high = first - 1, first
    while exists(store, commit_key(run, high)):
        low, high = high, 2 * high - first + 1
    while high - low > 1:
        middle = (low + high) // 2
        if exists(store, commit_key(run, middle)):
            low = middle
        else:
            high = middle
    return low


def _step_or_none(key: str) -> int | None:
    try:
        return step_of_key(key)
    except ValueError:
        return None


def _previous_digest(store: ObjectStore, commit: StepCommit) -> str:
    if commit.kind in ("genesis", "fork"):
        return read_run(store, commit.run)[1]
    return read_commit(store, commit.run, commit.step - 1)[1]


def _commit_below_head(store: ObjectStore, run: str, step: int) -> tuple[StepCommit, str]:
    try:
        return read_commit(store, run, step)
    except NotFound as error:
        raise Corrupt(
            f"The chain of run {run!r} breaks at step {step}: {commit_key(run, step)} is gone, but "
            "later steps are committed. Restore it from a copy of the store."
        ) from error


def _get_or_none(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFound:
        return None


def _parse(model: type[_Record], payload: bytes, key: str) -> _Record:
    try:
        return model.from_bytes(payload)
    except ValueError as error:
        raise Corrupt(
            f"{key} is not a {model.__name__}: {why_invalid(error)}. Restore it from a copy of the "
            "store."
        ) from error


def _expect(holds: bool, key: str, expected: str, found: str) -> None:
    if not holds:
        raise Corrupt(
            f"{key} holds something else: expected {expected}, found {found}. Restore it from a "
            "copy of the store."
        )


def _request_digest(record: StageRecord) -> str:
    # The shard number is in the key's stage, not in the request's.
    return request_digest(re.sub(r"-\d{4,}$", "", record.stage), record.request)


def _check_request(record: StageRecord, key: str) -> None:
    _expect(
        _request_digest(record) == record.request_digest,
        key,
        f"the request of digest {record.request_digest}",
        f"one of digest {_request_digest(record)}",
    )


def _record_ref(record: StageRecord, key: str, digest: str) -> RecordRef:
    return RecordRef(
        stage=record.stage, key=key, sha256=digest, request_digest=record.request_digest
    )
