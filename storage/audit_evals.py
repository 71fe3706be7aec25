"""The evaluations of a chain audit: each bound to the committed policy version that it measured."""

from typing import Any

from storage.audit_closure import Before, check_proof
from storage.audit_findings import Tally
from storage.audit_objects import Bench, open_bench, record_at
from storage.audit_steps import (
    UNCOMMITTED,
    UNREFERENCED,
    Audited,
    audit_extras,
    audit_objects,
    check_extra_record,
    note_strangers,
    record_refs,
    stage_at,
)
from storage.layout import EvalScope, eval_key, evals_prefix, part_of_key, record_key
from storage.records import EvalRecord, RecordRef, RunRecord, StageRecord


def find_evals(audited: Audited, tally: Tally) -> list[EvalScope]:
    """Returns every evaluation of the run that left something, by version and suite."""
    store, run = audited.store, audited.run.run
    prefix = evals_prefix(run)
    found: list[EvalScope] = []
    strangers: list[str] = []
    for version in store.folders(prefix):
        if not version.isdecimal() or f"{int(version):08d}" != version:
            strangers.append(f"{prefix}{version}/")
            continue
        suites = store.folders(f"{prefix}{version}/")
        found += [EvalScope(run=run, version=int(version), suite=suite) for suite in suites]
    note_strangers(tally, strangers)
    return found


def audit_eval(audited: Audited, scope: EvalScope, measured: Before | None) -> Tally:
    """Returns what is wrong with one evaluation; reads only.

    Args:
        audited: the run.
        scope: which evaluation.
        measured: the commit of the version; None if it could not be read.
    """
    tally = Tally()
    bench = open_bench(audited.store, f"{scope.prefix}/", tally, given_up=audited.given_up)
    key = eval_key(scope)
    if key not in bench.sizes:
        _audit_unfinished(bench, audited, scope)
        return tally
    tally.counts["evaluations"] += 1
    found = record_at(bench, key, EvalRecord)
    if found is not None:
        record = found[0]
        named = (record.run, record.policy_version, record.suite)
        tally.expect(key, "run, version, suite", named, (scope.run, scope.version, scope.suite))
        if measured is not None:
            expected = measured.commit.policy_digest
            tally.expect(key, "policy digest", record.policy_digest, expected)
        _audit_records(bench, audited, scope, record, measured)
    audit_extras(bench, None, kind=UNREFERENCED)
    return tally


def _audit_unfinished(bench: Bench, audited: Audited, scope: EvalScope) -> None:
    """An evaluation may be left undone; one of which everything is graded has its record.

    No commit seals evaluations, so this is what tells a lost record from one that never was.
    """
    sampled: dict[str, tuple[int, int]] = {}
    graded: set[str] = set()
    for key in sorted(key for key in bench.sizes if part_of_key(key) == "record"):
        record = check_extra_record(bench, key)
        room, _, shard = record.stage.partition("-") if record else ("", "", "")
        if record is not None and room == "rollout":
            start, stop = record.request.get("rows") or (0, 0)
            sampled[shard] = (start, stop)
        elif room == "reward":
            graded.add(shard)
    num_graded = sum(stop - start for shard, (start, stop) in sampled.items() if shard in graded)
    key, wanted = eval_key(scope), _num_prompts(audited.run, scope.suite)
    if num_graded >= wanted:
        expected = f"a record, because all {wanted} prompts are graded"
        bench.tally.broken(key, expected=expected, found="no object (resuming the run makes it)")
    else:
        bench.tally.note(f"{key}: unfinished, {num_graded} of {wanted} prompts are graded")
    audit_extras(bench, None, kind=UNCOMMITTED)


def _num_prompts(run: RunRecord, suite: str) -> int:
    """Returns how many held-out prompts a suite takes."""
    rows = run.prompts.held_out.rows or 0
    found: Any = run.config
    for name in ("evaluate", "suites", suite, "max_prompts"):
        found = found.get(name) if isinstance(found, dict) else None
    return min(found, rows) if isinstance(found, int) else rows


def _audit_records(
    bench: Bench,
    audited: Audited,
    scope: EvalScope,
    record: EvalRecord,
    measured: Before | None,
) -> None:
    key = eval_key(scope)
    bench.owners.update({ref.sha256: ref.key for ref in record.records})
    stages = {ref.stage: ref for ref in record.records}
    num_shards = len(record.records) // 2
    rooms = [f"{room}-{n:04d}" for room in ("rollout", "reward") for n in range(num_shards)]
    bench.tally.expect(key, "stages", [ref.stage for ref in record.records], rooms)
    records = {
        stage: made for stage, ref in stages.items() if (made := stage_at(bench, ref, named_by=key))
    }
    for stage in stages.keys() - records.keys():
        # Nothing seals an evaluation: what it names may be wrong as well as what lies there.
        named = f"{stages[stage].key} with sha256 {stages[stage].sha256}"
        found = "none such: one of the two was changed"
        bench.tally.broken(key, expected=f"the {stage} record that it names, {named}", found=found)
    for made in records.values():
        bench.owners.update({ref.sha256: ref.key for ref in record_refs(made)})
    for stage, made in records.items():
        expected = record_key(scope, stage, made.request_digest)
        bench.tally.expect(key, f"key of the {stage} record", stages[stage].key, expected)
        _check_stage(bench, audited, stages[stage], made, records)
        if stage.startswith("rollout-") and measured is not None:
            policy = measured.commit.policy
            bench.tally.expect(
                stages[stage].key, "policy", made.request.get("policy"), policy.digest
            )
            check_proof(made, policy, key=stages[stage].key, tally=bench.tally)
        audit_objects(bench, made)


def _check_stage(
    bench: Bench,
    audited: Audited,
    ref: RecordRef,
    made: StageRecord,
    records: dict[str, StageRecord],
) -> None:
    """Checks that a stage worked on the run's held-out prompts, and a grader on their samples."""
    expected: dict[str, object] = {
        "prompts": audited.run.prompts.held_out.sha256,
        "model": audited.run.model.digest,
    }
    sampled = records.get(ref.stage.replace("reward-", "rollout-"))
    if ref.stage.startswith("reward-") and sampled is not None and "samples" in sampled.outputs:
        expected["samples"] = sampled.outputs["samples"].sha256
    for name, value in expected.items():
        bench.tally.expect(ref.key, name, made.request.get(name), value)
