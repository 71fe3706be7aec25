"""What the reward stage checks in the store before it serves a request to a stranger."""

from storage.layout import EvalScope
from storage.ledger import find_record, read_record, read_run
from storage.object_store import ObjectStore
from tasks.admission import check_named, check_run, expect, open_step
from tasks.reward.contract import RewardConfig, RewardRequest


def admit(request: RewardRequest, store: ObjectStore, *, run: str) -> None:
    """Checks that the store bears out that `run` asks for this.

    Raises:
        Permanent: it does not; the message names what differs.
    """
    check_run(request.scope.run, served=run)
    if find_record(store, request.scope, stage=request.stage, request_digest=request.digest()):
        return
    if isinstance(request.scope, EvalScope):
        record, _ = read_run(store, run)
        expect(request.prompts, record.prompts.held_out, what="prompts", where="run.json")
    else:
        step = open_step(store, request.scope)
        where = f"revision {step.plan.revision} of the plan of step {request.scope.step}"
        assert step.plan.prompts is not None, "a plan with shards has prompts"
        prompts = read_record(store, step.plan.prompts).outputs["prompts"]
        config = RewardConfig.model_validate(step.plan.configs["reward"]).request_fields()
        expect(request.prompts, prompts, what="prompts", where=where)
        expect(request.config.request_fields(), config, what="config", where=where)
        expect(request.redo, step.plan.redo, what="redo", where=where)
    stage = f"rollout-{request.shard:04d}"
    check_named(store, request.scope, stage, "samples", request.samples)
