"""Evaluations held against their shards: no commit seals what they say, so it is computed again."""

from dataclasses import dataclass

from flows.eval_records import eval_record
from flows.verify_shards import MALFORMED, Facts, Graders, Shard, audit_shard
from storage.audit_findings import CHAIN, REPLAY, Tally
from storage.errors import Corrupt, NotFound
from storage.layout import EvalScope, eval_key
from storage.ledger import read_commit, read_evals, read_record
from storage.object_store import ObjectStore
from storage.records import EvalRecord, RecordRef, RunRecord, StageRecord, why_invalid
from tasks.errors import Permanent
from tasks.reward.contract import RewardConfig


def audit_evaluations(
    store: ObjectStore,
    run: RunRecord,
    *,
    first: int,
    last: int,
    graders: Graders | None,
    facts: Facts,
) -> None:
    """Adds to `facts` which evaluations do not say what their shards say.

    Args:
        store: holds the run.
        run: whose evaluations.
        first: the first version that is looked at.
        last: the last one.
        graders: grade the samples again; None computes only what the records say.
        facts: takes what is found.
    """
    try:
        found = read_evals(store, run.run)
    except Corrupt:
        # The chain says which one is no record.
        return
    for record in found:
        if first <= record.policy_version <= last:
            _audit_evaluation(store, run, record, graders=graders, facts=facts)


READABLE = "an evaluation whose shards can be read"


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation, read."""

    store: ObjectStore
    run: RunRecord
    record: EvalRecord
    records: list[tuple[RecordRef, StageRecord]]

    @property
    def scope(self) -> EvalScope:
        """Its keys."""
        record = self.record
        return EvalScope(run=self.run.run, version=record.policy_version, suite=record.suite)


def _audit_evaluation(
    store: ObjectStore,
    run: RunRecord,
    record: EvalRecord,
    *,
    graders: Graders | None,
    facts: Facts,
) -> None:
    scope = EvalScope(run=run.run, version=record.policy_version, suite=record.suite)
    key, tally = eval_key(scope), Tally()
    try:
        records = [(ref, read_record(store, ref)) for ref in record.records]
        evaluation = _Evaluation(store, run, record, records)
        _check_figures(evaluation, tally)
        if graders is not None:
            _audit_shards(evaluation, graders, facts, tally)
    except (NotFound, Corrupt) as error:
        if not facts.chain_is_broken:
            tally.broken(key, expected=READABLE, found=str(error))
    except (Permanent, *MALFORMED) as error:
        tally.broken(key, expected=READABLE, found=f"{type(error).__name__}: {error}")
    except ValueError as error:
        version = record.policy_version
        facts.unchecked.append(f"evaluation of version {version}: {why_invalid(error)}")
    facts.tally.add(tally)


def _check_figures(evaluation: _Evaluation, tally: Tally) -> None:
    graded = [made for ref, made in evaluation.records if ref.stage.startswith("reward-")]
    if not graded:
        raise KeyError("reward-0000")
    part = RewardConfig.model_validate(graded[0].request["config"]).accuracy_part.stored_name
    again = eval_record(
        evaluation.store,
        evaluation.scope,
        policy_digest=evaluation.record.policy_digest,
        records=evaluation.records,
        accuracy_part=part,
    )
    stored, expected = evaluation.record.model_dump(mode="json"), again.model_dump(mode="json")
    for name, value in expected.items():
        tally.expect(eval_key(evaluation.scope), name, stored[name], value, promise=CHAIN)


def _audit_shards(evaluation: _Evaluation, graders: Graders, facts: Facts, tally: Tally) -> None:
    """Checks all shards, and that their rows follow one another from the first prompt on."""
    store, run, scope = evaluation.store, evaluation.run, evaluation.scope
    records = {ref.stage: record for ref, record in evaluation.records}
    policy = read_commit(store, run.run, scope.version)[0].policy
    edge = 0
    for stage in sorted(stage for stage in records if stage.startswith("rollout-")):
        start, stop = records[stage].request["rows"]
        tally.expect(eval_key(scope), f"first prompt of {stage}", start, edge, promise=REPLAY)
        edge = stop
        shard = Shard(scope, run, run.prompts.held_out, policy, stage.partition("-")[2])
        audit_shard(store, shard, records, graders, facts, tally)
