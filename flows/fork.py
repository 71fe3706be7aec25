"""A run that leaves another one at a committed step; nothing is copied."""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import tasks.checkpoint.stage as checkpoint_stage
from flows.changes import config_as_of, data_changes
from flows.config import RunConfig, max_prompt_tokens
from flows.export import parse_target
from flows.launch import check_prompts, check_storable, put_run, refuse_existing
from flows.limits import check_pythons
from flows.overrides import with_overrides
from flows.signing import find_signer
from storage.errors import NotFound
from storage.given_up import check_policy_kept
from storage.inputs import open_input
from storage.layout import StepScope
from storage.ledger import (
    adopt_plan,
    current_plan,
    head,
    read_commit,
    read_plan,
    read_run,
)
from storage.object_store import ObjectStore
from storage.records import (
    ObjectRef,
    ParentRef,
    Plan,
    PromptInputs,
    RunRecord,
    StepCommit,
)
from tasks.checkpoint.contract import CheckpointRequest
from tasks.prompts.contract import PrepareRequest
from tasks.prompts.prepare import prepare
from tasks.workspace import Workspace


def fork_run(
    store: ObjectStore,
    target: str,
    *,
    run: str,
    overrides: Sequence[str] = (),
    workspace: Workspace,
) -> RunRecord:
    """Puts the run.json of a run that continues `RUN[@STEP]` under another name.

    Seed, cursor, prompts and config are the parent's unless `overrides` change them; changed data
    sets are read and stored anew. `fork_commit` then makes its first commit; whatever dies between
    the two, the next resume does so.

    Raises:
        NotFound: no such run or step, or its policy was given up by retention.
        AlreadyExists: there is a run `run`.
        ValueError: the overrides do not fit, or change the model.
    """
    refuse_existing(store, run)
    find_signer()
    parent, commit, digest = _find_commit(store, target)
    check_policy_kept(store, commit)
    before = config_as_of(parent, read_plan(store, commit.plan))
    config = with_overrides(before, overrides)
    if config.model != before.model:
        raise ValueError(
            f"A fork continues the policy of {parent.run}@{commit.step}, so model cannot change. "
            "Expected other settings. Export that policy and launch a run with it as model.path."
        )
    check_storable(config)
    check_pythons(config)
    inputs = parent.prompts
    if data_changes(before, config) or config.seed != before.seed:
        inputs = _prepare(store, parent, config, workspace)
    record = parent.model_copy(
        update={
            "run": run,
            "launch_id": uuid.uuid4().hex,
            "config": config.model_dump(mode="json"),
            "prompts": inputs,
            "parent": ParentRef(run=parent.run, step=commit.step, sha256=digest),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    return put_run(store, record, run=run)


def _find_commit(store: ObjectStore, target: str) -> tuple[RunRecord, StepCommit, str]:
    name, step = parse_target(target)
    parent, _ = read_run(store, name)
    newest = head(store, name)
    if newest is None:
        raise NotFound(
            f"Run {name!r} has no commit yet. Expected one to fork from: resume it first."
        )
    if step is None:
        return parent, *newest
    try:
        return parent, *read_commit(store, name, step)
    except NotFound as error:
        first = parent.parent.step if parent.parent else 0
        raise NotFound(
            f"Step {step} of run {name!r} is not committed. Expected {first} to {newest[0].step}."
        ) from error


def _prepare(
    store: ObjectStore, parent: RunRecord, config: RunConfig, workspace: Workspace
) -> PromptInputs:
    tokenizer_dir = open_input(store, parent.model, cache=workspace.cache)
    request = PrepareRequest(
        config=config.prompts,
        seed=config.seed,
        tokenizer=parent.model,
        max_prompt_tokens=max_prompt_tokens(config),
    )
    inputs = prepare(request, store, tokenizer_dir=tokenizer_dir, cache=workspace.cache)
    check_prompts(config, inputs, store, workspace=workspace)
    return inputs


def fork_commit(store: ObjectStore, run: str) -> tuple[StepCommit, str]:
    """Makes the first commit of a fork exist and returns it with its digest. Safe to repeat.

    It names the parent's commit by digest and takes over its policy, state and cursor; no engine
    and no Prefect server are needed. The policy's files are looked for once more: since run.json is
    there gc keeps them, but one that did not see it yet has said what it gives up.

    Raises:
        NotFound: the policy was given up meanwhile.
        Corrupt: the parent's commit is not the one that run.json names.
    """
    record, run_digest = read_run(store, run)
    parent = record.parent
    assert parent is not None, "only a fork begins this way"
    commit, _ = read_commit(store, parent.run, parent.step)
    check_policy_kept(store, commit)
    plan, plan_ref = _fork_plan(store, record, commit, previous=run_digest)
    request = CheckpointRequest(
        scope=StepScope(run=run, step=parent.step),
        kind="fork",
        plan=plan_ref,
        records=[],
        cursor=plan.cursor,
        previous=plan.previous,
        metrics={},
        parent=parent,
    )
    result = checkpoint_stage.run(request, store, find_signer())
    return result.commit, result.digest


def _fork_plan(
    store: ObjectStore, record: RunRecord, commit: StepCommit, *, previous: str
) -> tuple[Plan, ObjectRef]:
    found = current_plan(store, record.run, commit.step)
    if found is not None:
        return found
    plan = Plan(
        run=record.run,
        step=commit.step,
        kind="fork",
        previous=previous,
        prompts=None,
        shards=[],
        cursor=commit.cursor,
        configs=record.config,
    )
    return adopt_plan(store, plan)
