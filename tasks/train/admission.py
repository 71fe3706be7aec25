"""What the train stage checks in the store before it serves a request to a stranger."""

from concurrent.futures import ThreadPoolExecutor

from storage.ledger import find_record, read_record
from storage.object_store import ObjectStore
from tasks.admission import OpenStep, check_named, check_run, committed, expect, open_step
from tasks.errors import Permanent
from tasks.train.contract import (
    GenesisRequest,
    ReplayRequest,
    SnapshotRequest,
    TrainConfig,
    TrainRequest,
)
from tasks.train.history import updates_so_far

_NUM_READERS = 16


def admit(
    request: GenesisRequest | TrainRequest | SnapshotRequest | ReplayRequest,
    store: ObjectStore,
    *,
    run: str,
) -> None:
    """Checks that the store bears out that `run` asks for this.

    A request whose record is there passes: it costs nothing and changes nothing.

    Raises:
        Permanent: it does not; the message names what differs.
    """
    if isinstance(request, ReplayRequest):
        raise Permanent("A service trains its run and replays nothing: use `rollbook verify`.")
    check_run(request.scope.run, served=run)
    if isinstance(request, SnapshotRequest):
        commit = committed(store, request.scope)
        state = commit.state_id if commit else None
        expect(request.state_id, state, what="state", where=f"commit {request.scope.step}")
        return
    if find_record(store, request.scope, stage="train", request_digest=request.digest()):
        return
    step = open_step(store, request.scope)
    where = f"revision {step.plan.revision} of the plan of step {request.scope.step}"
    config = TrainConfig.model_validate(step.plan.configs["train"]).request_fields()
    expect(request.config.request_fields(), config, what="config", where=where)
    expect(request.redo, step.plan.redo, what="redo", where=where)
    expect(request.model, step.record.model, what="model", where="run.json")
    if isinstance(request, GenesisRequest):
        expect(request.weights, step.record.weights, what="weights", where="run.json")
        expect(request.seed, step.plan.configs["seed"], what="seed", where=where)
    else:
        _check_update(request, step, store, where=where)


def _check_update(request: TrainRequest, step: OpenStep, store: ObjectStore, *, where: str) -> None:
    plan, last = step.plan, step.last
    if last is None or plan.prompts is None:
        raise Permanent(f"Step {request.scope.step} has no committed step before it to train from.")
    before = f"commit {last.step}"
    expect(request.policy, last.policy, what="policy", where=before)
    expect(request.state_id, last.state_id, what="state", where=before)
    expect(request.update_index, updates_so_far(store, last), what="update index", where=before)
    expect(
        request.temperature, plan.shards[0].sampling.temperature, what="temperature", where=where
    )
    prompts = read_record(store, plan.prompts).outputs["prompts"]
    expect(request.prompts, prompts, what="prompts", where=where)
    shards = (len(request.samples), len(request.rewards))
    expect(shards, (len(plan.shards), len(plan.shards)), what="number of shards", where=where)
    wanted = [
        *((f"rollout-{index:04d}", "samples", ref) for index, ref in enumerate(request.samples)),
        *((f"reward-{index:04d}", "rewards", ref) for index, ref in enumerate(request.rewards)),
    ]
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        for _ in readers.map(lambda each: check_named(store, request.scope, *each), wanted):
            pass
