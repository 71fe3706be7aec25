"""One step of a chain audit: everything under its prefix, and what its commit names elsewhere."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from storage.audit_closure import SNAPSHOT, Before, ClosedStep, check_closure
from storage.audit_findings import Tally
from storage.audit_objects import (
    Bench,
    check_object,
    check_policy,
    open_bench,
    outside_bench,
    record_at,
)
from storage.layout import (
    StepScope,
    commit_key,
    part_of_key,
    plan_key,
    plan_revision_of_key,
)
from storage.object_store import ObjectStore
from storage.records import (
    ObjectRef,
    Plan,
    RecordRef,
    RunRecord,
    StageRecord,
    StepCommit,
    request_digest,
)
from storage.signing import PublicKey, check_signature

UNREFERENCED, UNCOMMITTED = "unreferenced", "uncommitted"
"""What an object that nothing names counts as: a dead attempt's garbage, or an open step's work."""

MAX_STRANGERS = 5
"""Foreign keys of one step that are named; the others are counted."""


@dataclass(frozen=True)
class Audited:
    """The run that is audited, and what its auditor knows besides the store."""

    store: ObjectStore
    run: RunRecord
    run_digest: str
    key: PublicKey | None
    given_up: Callable[[str], bool]


@dataclass(frozen=True)
class StepOutcome:
    """What is known of one step: its commit's digest if there is a commit, and what was found.

    `planned_on` is the commit that the plan of an uncommitted step was made on; `num_objects`
    counts what lies there.
    """

    step: int
    is_committed: bool
    digest: str | None
    planned_on: str | None
    num_objects: int
    tally: Tally


def audit_step(
    audited: Audited, step: int, before: Before | None
) -> tuple[StepOutcome, Before | None]:
    """Returns what is wrong with a step, and its commit for the step after; reads only.

    Args:
        audited: the run.
        step: of that run.
        before: the commit that it follows; None at genesis, or if that one could not be read.
    """
    tally = Tally()
    prefix = f"{StepScope(run=audited.run.run, step=step).prefix}/"
    bench = open_bench(audited.store, prefix, tally, given_up=audited.given_up)
    key = commit_key(audited.run.run, step)
    if key not in bench.sizes:
        planned_on = _audit_open(bench, audited, step)
        return StepOutcome(step, False, None, planned_on, len(bench.sizes), tally), None
    tally.counts["steps"] += 1
    found = record_at(bench, key, StepCommit)
    digest = found[1] if found else None
    this = None
    if found is not None:
        commit, _, payload = found
        _check_signature(bench, audited, key, payload)
        where = (commit.run, commit.step)
        if tally.expect(key, "run, step", where, (audited.run.run, step)):
            this = Before(commit, found[1])
            _audit_commit(bench, audited, this, before)
    audit_extras(bench, this.commit if this else None, kind=UNREFERENCED)
    return StepOutcome(step, True, digest, None, len(bench.sizes), tally), this


def read_link(audited: Audited, step: int) -> Before | None:
    """Returns the commit of a step, or None; says nothing of what is wrong with it."""
    bench = outside_bench(audited.store, Tally())
    found = record_at(bench, commit_key(audited.run.run, step), StepCommit)
    return Before(found[0], found[1], is_audited=False) if found else None


def audit_link(
    audited: Audited, step: int, before: Before | None
) -> tuple[StepOutcome, Before | None]:
    """Returns what is wrong with a step's commit alone and with its link to the one before.

    Args:
        audited: the run.
        step: of that run.
        before: see `audit_step`.
    """
    tally = Tally()
    bench = outside_bench(audited.store, tally)
    key = commit_key(audited.run.run, step)
    tally.counts["links"] += 1
    if bench.size(key) is None:
        return StepOutcome(step, False, None, None, 0, tally), None
    found = record_at(bench, key, StepCommit)
    if found is None:
        return StepOutcome(step, True, None, None, 1, tally), None
    commit, digest, payload = found
    tally.expect(key, "run, step", (commit.run, commit.step), (audited.run.run, step))
    _check_signature(bench, audited, key, payload)
    if commit.kind in ("genesis", "fork"):
        tally.expect(key, "digest of run.json", commit.previous, audited.run_digest)
    elif before is not None:
        earlier = commit_key(before.commit.run, before.commit.step)
        tally.expect(earlier, f"digest, as {key} names it,", before.digest, commit.previous)
    return StepOutcome(step, True, digest, None, 1, tally), Before(commit, digest)


def _check_signature(bench: Bench, audited: Audited, key: str, payload: bytes) -> None:
    """Counts what signatures are worth; with a key, one that is not good is broken."""
    check = check_signature(payload, audited.key)
    bench.tally.counts[f"signature {check.verdict}"] += 1
    if check.verdict == "bad" or (audited.key is not None and check.verdict != "good"):
        expected = "a good signature" + (" by the key given" if audited.key else ", or none")
        by = f" (by {check.public_key})" if check.public_key else ""
        found = check.reason or f"{check.verdict}{by}"
        bench.tally.broken(key, expected=expected, found=found)


def _audit_commit(bench: Bench, audited: Audited, this: Before, before: Before | None) -> None:
    commit = this.commit
    plan, key = _plan_at(bench, commit), commit_key(commit.run, commit.step)
    records = {
        ref.stage: record
        for ref in commit.records
        if (record := stage_at(bench, ref, named_by=key))
    }
    closed = ClosedStep(
        run=audited.run,
        run_digest=audited.run_digest,
        commit=commit,
        before=before,
        plan=plan,
        records=records,
        tally=bench.tally,
    )
    check_closure(closed)
    for record in records.values():
        bench.owners.update({ref.sha256: ref.key for ref in record_refs(record)})
    for stage, record in records.items():
        # That of the step before lies there, and was looked at with it.
        if stage != SNAPSHOT or before is None or not before.is_audited:
            audit_objects(bench, record)
    seen = before.commit.policy if before is not None and before.is_audited else None
    if seen is None or commit.policy.files != seen.files:
        check_policy(bench, commit.policy, key=closed.key)


def _plan_at(bench: Bench, commit: StepCommit) -> Plan | None:
    bench.owners.update({ref.sha256: ref.key for ref in commit.records})
    bench.owners[commit.plan.sha256] = commit.plan.key
    found = record_at(bench, commit.plan.key, Plan, sha256=commit.plan.sha256)
    if found is None:
        return None
    bench.tally.expect(commit.plan.key, "bytes", len(found[2]), commit.plan.num_bytes)
    return found[0]


def stage_at(bench: Bench, ref: RecordRef, *, named_by: str) -> StageRecord | None:
    """Returns a record if it is whole and of the request that it is named for, else says why.

    Args:
        bench: where to look and say.
        ref: names the record.
        named_by: the key of what holds `ref`: it is wrong if the record agrees with itself.
    """
    found = record_at(bench, ref.key, StageRecord, sha256=ref.sha256)
    if found is None:
        return None
    record, tally = found[0], bench.tally
    tally.expect(ref.key, "digest of its request", body_digest(record), record.request_digest)
    told = (ref.stage, ref.request_digest)
    own = (record.stage, record.request_digest)
    tally.expect(named_by, f"stage, request digest of {ref.key}", told, own)
    return record


def body_digest(record: StageRecord) -> str:
    """Returns the digest of a record's request; the shard's number is no part of a request."""
    return request_digest(re.sub(r"-\d{4,}$", "", record.stage), record.request)


def audit_objects(bench: Bench, record: StageRecord) -> None:
    """Looks at all that a record names but the policy, which its commit names too."""
    for output in record.outputs.values():
        check_object(bench, output)
    if record.snapshot is not None:
        for file in record.snapshot.files.values():
            check_object(bench, file, may_be_given_up=True)


def record_refs(record: StageRecord) -> list[ObjectRef]:
    """Returns the references to all objects of a record."""
    policy = [*record.policy.files, record.policy.probe] if record.policy else []
    snapshot = list(record.snapshot.files.values()) if record.snapshot else []
    return [*record.outputs.values(), *policy, *snapshot]


def _audit_open(bench: Bench, audited: Audited, step: int) -> str | None:
    """Looks at a step without a commit; returns the commit that its newest plan was made on."""
    run, tally = audited.run.run, bench.tally
    planned_on = None
    for key in sorted(key for key in bench.sizes if part_of_key(key) == "plan"):
        found = record_at(bench, key, Plan)
        if found is not None:
            plan = found[0]
            named = (plan.run, plan.step, plan_key(run, step, plan.revision))
            tally.expect(key, "run, step, key", named, (run, step, key))
            planned_on = plan.previous
    audit_extras(bench, None, kind=UNCOMMITTED)
    return planned_on


def audit_extras(bench: Bench, commit: StepCommit | None, *, kind: str) -> None:
    """Looks at what lies on the bench and is named by nobody.

    Args:
        bench: with everything that is named marked as such.
        commit: the step's, if it has one.
        kind: what such objects count as: garbage of a closed step, or work of an open one.
    """
    held = _held_by_snapshots(bench) if commit is not None else set[str]()
    strangers: list[str] = []
    for key, num_bytes in bench.sizes.items():
        if key in bench.named:
            continue
        part = part_of_key(key)
        if part is None and plan_revision_of_key(key) is not None:
            expected = "no such key: the numbers of plans have a fixed width"
            bench.tally.broken(key, expected=expected, found="an object that reads like one")
        elif part is None:
            strangers.append(key)
        elif part == "plan":
            _check_extra_plan(bench, key, commit)
        elif part == "record":
            check_extra_record(bench, key)
        if part in ("attempt", "record") and key not in held:
            bench.tally.counts[kind] += 1
            bench.tally.counts[f"{kind} bytes"] += num_bytes
    note_strangers(bench.tally, strangers)


def note_strangers(tally: Tally, keys: list[str]) -> None:
    """Names keys that Rollbook never writes; they mislead no reader, so nothing is broken."""
    for key in keys[:MAX_STRANGERS]:
        tally.note(f"{key} is none of Rollbook's keys; nothing reads it")
    if len(keys) > MAX_STRANGERS:
        more = len(keys) - MAX_STRANGERS
        tally.note(f"{more} more such keys beside {keys[0]}")


def _check_extra_plan(bench: Bench, key: str, commit: StepCommit | None) -> None:
    """A plan that its commit does not name was superseded, or came too late."""
    found = record_at(bench, key, Plan)
    if found is None or commit is None:
        return
    plan, tally = found[0], bench.tally
    revision = plan_revision_of_key(key)
    named = (plan.run, plan.step, plan.revision)
    tally.expect(key, "run, step, revision", named, (commit.run, commit.step, revision))
    tally.expect(key, "previous", plan.previous, commit.previous)
    committed = plan_revision_of_key(commit.plan.key)
    if committed is not None and plan.revision > committed:
        tally.note(
            f"{key} came after the plan that step {commit.step} was committed by, and counts for "
            "nothing"
        )
    else:
        tally.counts["superseded plans"] += 1


def check_extra_record(bench: Bench, key: str) -> StageRecord | None:
    """Returns a record that no commit names (an attempt under another plan), if it is sound."""
    found = record_at(bench, key, StageRecord)
    if found is None:
        return None
    record = found[0]
    stage, digest = key.rsplit("/", 2)[1:]
    sound = bench.tally.expect(key, "stage", record.stage, stage)
    named = (record.request_digest, body_digest(record))
    expected = digest.removesuffix(".json")
    sound = bench.tally.expect(key, "request digests", named, (expected, expected)) and sound
    return record if sound else None


def _held_by_snapshots(bench: Bench) -> set[str]:
    """Returns the keys that snapshot records of this step hold, and looks at what they name.

    They are made at a graceful stop: the next commit seals them, and a resume reads them before.
    """
    held: set[str] = set()
    for key in bench.sizes:
        if part_of_key(key) == "record" and key.rsplit("/", 2)[1] == SNAPSHOT:
            record = check_extra_record(bench, key)
            if record is not None:
                held |= {key, *(ref.key for ref in record_refs(record))}
                audit_objects(bench, record)
                bench.tally.counts["snapshots of stops"] += 1
    return held
