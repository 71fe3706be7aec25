"""What the rollout stage checks in the store before it serves a request to a stranger."""

from storage.layout import EvalScope, StepScope
from storage.ledger import find_record, read_record, read_run, stage_records
from storage.object_store import ObjectStore
from storage.records import PolicyRef
from tasks.admission import check_run, committed, expect, open_step
from tasks.errors import Permanent
from tasks.rollout.contract import LoadRequest, ReplayRequest, RolloutConfig, RolloutRequest


def admit(
    request: RolloutRequest | LoadRequest | ReplayRequest, store: ObjectStore, *, run: str
) -> None:
    """Checks that the store bears out that `run` asks for this.

    A request whose record is there passes: it costs nothing and changes nothing.

    Raises:
        Permanent: it does not; the message names what differs.
    """
    if isinstance(request, ReplayRequest):
        raise Permanent("A service samples for its run and replays nothing: use `rollbook verify`.")
    if isinstance(request, LoadRequest):
        _check_policy(request.policy, store, run)
        return
    check_run(request.scope.run, served=run)
    if find_record(store, request.scope, stage=request.stage, request_digest=request.digest()):
        return
    if isinstance(request.scope, EvalScope):
        _check_evaluation(request, request.scope, store)
    else:
        _check_shard(request, request.scope, store)


def _check_shard(request: RolloutRequest, scope: StepScope, store: ObjectStore) -> None:
    step = open_step(store, scope)
    plan = step.plan
    where = f"revision {plan.revision} of the plan of step {scope.step}"
    if not 0 <= request.shard < len(plan.shards):
        raise Permanent(f"There is no shard {request.shard} in {where}. Nothing was done.")
    shard = plan.shards[request.shard]
    assert plan.prompts is not None, "a plan with shards has prompts"
    prompts = read_record(store, plan.prompts).outputs["prompts"]
    limits = RolloutConfig.model_validate(plan.configs["rollout"]).request_fields()
    expect((request.start, request.stop), (shard.start, shard.stop), what="rows", where=where)
    expect(request.sampling, shard.sampling, what="sampling", where=where)
    expect(request.seed, shard.seed, what="seed", where=where)
    expect(request.redo, plan.redo, what="redo", where=where)
    expect(request.prompts, prompts, what="prompts", where=where)
    expect(request.config.request_fields(), limits, what="config", where=where)
    expect(request.model, step.record.model, what="model", where="run.json")
    policy = step.last.policy if step.last else None
    expect(request.policy, policy, what="policy", where=f"commit {scope.step - 1}")


def _check_evaluation(request: RolloutRequest, scope: EvalScope, store: ObjectStore) -> None:
    record, _ = read_run(store, scope.run)
    commit = committed(store, StepScope(run=scope.run, step=scope.version))
    policy = commit.policy if commit else None
    expect(request.policy, policy, what="policy", where=f"commit {scope.version}")
    expect(request.prompts, record.prompts.held_out, what="prompts", where="run.json")
    expect(request.model, record.model, what="model", where="run.json")


def _check_policy(policy: PolicyRef, store: ObjectStore, run: str) -> None:
    """Checks that a committed step or a train record of the run names the policy."""
    scope = StepScope(run=run, step=policy.version)
    commit = committed(store, scope)
    if commit is not None and commit.policy == policy:
        return
    if policy not in [record.policy for record in stage_records(store, scope, "train")]:
        raise Permanent(
            f"Policy {policy.version} ({policy.digest[:16]}) is named by no record of run {run!r}. "
            "Expected one that its trainer made; nothing was loaded."
        )
