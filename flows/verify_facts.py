"""The facts of a committed step computed again from the store: no engine, no torch.

Prompts are drawn again, rewards graded again, advantages judged again, by the stages' own code.
"""

from dataclasses import dataclass

from flows.metrics import step_metrics
from flows.verify_shards import MALFORMED, NOT_CHECKED, Facts, Graders, Shard, audit_shard
from storage.audit_findings import CHAIN, CUT, REPLAY, Tally
from storage.errors import Corrupt, NotFound
from storage.layout import StepScope, commit_key
from storage.ledger import read_plan, read_record
from storage.object_store import ObjectStore
from storage.records import Plan, RecordRef, RunRecord, StageRecord, StepCommit, why_invalid
from tasks.errors import Permanent
from tasks.prompts.audit import audit_prompts
from tasks.reward.contract import RewardConfig
from tasks.train.audit import audit_train
from tasks.train.history import updates_so_far

READABLE = "a step whose facts can be read"


@dataclass(frozen=True)
class _Step:
    """A committed step, read: what its stages were asked and what they recorded."""

    store: ObjectStore
    run: RunRecord
    commit: StepCommit
    before: StepCommit
    plan: Plan
    refs: dict[str, RecordRef]
    records: dict[str, StageRecord]


def audit_facts(
    store: ObjectStore,
    run: RunRecord,
    commit: StepCommit,
    before: StepCommit | None,
    *,
    graders: Graders,
    facts: Facts,
) -> None:
    """Adds to `facts` everything in which a step is not what its stages make of its inputs.

    Args:
        store: holds the run.
        run: whose step it is.
        commit: of the step.
        before: the commit that it follows; None at genesis.
        graders: grade again.
        facts: takes what is found.
    """
    if before is None or commit.kind not in ("train", "skipped"):
        return
    key = commit_key(commit.run, commit.step)
    tally = Tally()
    try:
        _audit_step(_read(store, run, commit, before), graders, facts, tally)
    except (NotFound, Corrupt) as error:
        if facts.chain_is_broken:
            _leave_out(facts, tally, commit.step, "what it needs is broken, see above")
        else:
            tally.broken(key, expected=READABLE, found=str(error), promise=REPLAY)
    except (Permanent, *MALFORMED) as error:
        found = f"{type(error).__name__}: {error}"
        tally.broken(key, expected=READABLE, found=found, promise=REPLAY)
    except ValueError as error:
        _leave_out(facts, tally, commit.step, why_invalid(error))
    facts.tally.add(tally)
    facts.steps.append(commit.step)


def _leave_out(facts: Facts, tally: Tally, step: int, why: str) -> None:
    tally.counts[NOT_CHECKED] += 1
    facts.unchecked.append(f"step {step}: {why}")


def _read(store: ObjectStore, run: RunRecord, commit: StepCommit, before: StepCommit) -> _Step:
    refs = {ref.stage: ref for ref in commit.records}
    records = {stage: read_record(store, ref) for stage, ref in refs.items()}
    return _Step(store, run, commit, before, read_plan(store, commit.plan), refs, records)


def _audit_step(step: _Step, graders: Graders, facts: Facts, tally: Tally) -> None:
    prompts = step.records["prompts"]
    audit_prompts(
        step.store,
        step.refs["prompts"],
        prompts,
        inputs=step.run.prompts,
        cursor=step.commit.cursor,
        tally=tally,
    )
    if step.commit.kind == "skipped":
        tally.counts["groups skipped"] += prompts.outputs["prompts"].rows or 0
        return
    scope = StepScope(run=step.commit.run, step=step.commit.step)
    numbers = [f"{shard.index:04d}" for shard in step.plan.shards]
    shard = prompts.outputs["prompts"]
    graded_as = RewardConfig.model_validate(step.plan.configs["reward"]).request_fields()
    for number in numbers:
        asked = step.records[f"reward-{number}"].request["config"]
        tally.expect(step.refs[f"reward-{number}"].key, "config", asked, graded_as, promise=CHAIN)
        audit_shard(
            step.store,
            Shard(scope, step.run, shard, step.before.policy, number),
            step.records,
            graders,
            facts,
            tally,
        )
    train = step.records["train"]
    audit_train(
        step.store,
        step.refs["train"],
        train,
        samples=[step.records[f"rollout-{number}"].outputs["samples"] for number in numbers],
        rewards=[step.records[f"reward-{number}"].outputs["rewards"] for number in numbers],
        tally=tally,
    )
    expected = updates_so_far(step.store, step.before)
    found = train.request["update_index"]
    tally.expect(step.refs["train"].key, "update index", found, expected, promise=CUT)
    _check_metrics(step, numbers, tally)


def _check_metrics(step: _Step, numbers: list[str], tally: Tally) -> None:
    """Checks that the figures of a commit are those of its records; seconds are nobody's."""
    expected = step_metrics(
        [step.records[f"rollout-{number}"] for number in numbers],
        [step.records[f"reward-{number}"] for number in numbers],
        step.records["train"],
        {},
    )
    key = commit_key(step.commit.run, step.commit.step)
    for name in step.commit.metrics.keys() & expected.keys():
        found = step.commit.metrics[name]
        tally.expect(key, f"metric {name}", found, expected[name], promise=CHAIN)
