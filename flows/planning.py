"""The plan of a step: made once, adopted by every controller, superseded only when asked."""

import hashlib

from flows.changes import config_as_of
from flows.session import Session, Supersede
from storage.layout import StepScope
from storage.ledger import adopt_plan, current_plan, record_ref
from storage.records import (
    Cursor,
    ObjectRef,
    Plan,
    SamplingPolicy,
    ShardPlan,
    StepCommit,
)
from tasks.prompts.contract import PromptsRequest
from tasks.prompts.task import prompts


def plan_step(session: Session, scope: StepScope) -> tuple[Plan, ObjectRef]:
    """Returns the plan of a step: the stored one, else a new one, put and adopted.

    If the session is to supersede the open step's plan, a further revision is put.
    """
    found = current_plan(session.store, scope.run, scope.step)
    change, session.supersede = session.supersede, None
    if found is not None and change is None:
        return found
    before = found[0] if found else None
    revision, redo = _revised(before, change)
    skipped = change is not None and change.kind == "skipped"
    # What is skipped are the groups that were planned, whatever config goes on from here.
    config = config_as_of(session.run, before) if skipped and before else session.config
    num_groups = config.prompts.groups_per_step
    made = _new_plan(session, scope, num_groups=num_groups, redo=redo)
    if change is not None:
        shards = [] if skipped else made.shards
        fields = {"kind": change.kind, "reason": change.reason, "shards": shards}
        made = made.model_copy(update=fields)
    return adopt_plan(session.store, made.model_copy(update={"revision": revision}))


def genesis_plan(session: Session, scope: StepScope) -> tuple[Plan, ObjectRef]:
    """Returns the plan of step 0: the stored one, else a new one, put and adopted."""
    found = current_plan(session.store, scope.run, scope.step)
    change, session.supersede = session.supersede, None
    if found is not None and change is None:
        return found
    revision, redo = _revised(found[0] if found else None, change)
    plan = Plan(
        run=scope.run,
        step=scope.step,
        revision=revision,
        redo=redo,
        kind="genesis",
        reason=change.reason if change else None,
        previous=session.run_digest,
        prompts=None,
        shards=[],
        cursor=Cursor(),
        configs=session.config.model_dump(mode="json"),
    )
    return adopt_plan(session.store, plan)


def _revised(before: Plan | None, change: Supersede | None) -> tuple[int, int]:
    """Returns revision and redo of the plan that comes after `before`."""
    revision = before.revision + 1 if before else 0
    if change is not None and change.afresh:
        # From 1 on, because 0 is no field of a request: a first plan cannot be afresh.
        return revision, max(revision, 1)
    return revision, before.redo if before else 0


def _new_plan(session: Session, scope: StepScope, *, num_groups: int, redo: int) -> Plan:
    previous = session.last_commit
    drawn = prompts(
        PromptsRequest(
            scope=scope,
            seed=session.config.seed,
            inputs=session.run.prompts,
            cursor=previous.cursor,
            num_groups=num_groups,
            redo=redo,
        ),
        session.stages.prompts,
    )
    return Plan(
        run=scope.run,
        step=scope.step,
        kind="train",
        redo=redo,
        previous=session.last_digest,
        prompts=record_ref(scope, drawn.record, store=session.store),
        shards=_shards(session, previous),
        cursor=drawn.cursor,
        configs=session.config.model_dump(mode="json"),
    )


def _shards(session: Session, previous: StepCommit) -> list[ShardPlan]:
    config = session.config
    groups, size = config.prompts.groups_per_step, config.rollout.groups_per_shard
    sampling = SamplingPolicy(
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        stop_token_ids=session.run.stop_token_ids,
    )
    seed = derived_seed(config.seed, "rollout", previous.cursor.drawn)
    return [
        ShardPlan(
            index=index,
            start=start,
            stop=min(start + size, groups),
            sampling=sampling,
            policy_version=previous.policy_version,
            policy_digest=previous.policy_digest,
            seed=seed,
        )
        for index, start in enumerate(range(0, groups, size))
    ]


def derived_seed(seed: int, *purpose: str | int) -> int:
    """Returns a 48-bit seed for one purpose, so that group seeds have room to be spaced."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
