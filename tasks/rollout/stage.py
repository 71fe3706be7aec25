"""The rollout stage: one shard of prompt groups in, one shard of samples and their record out."""

import logging
import uuid
from collections.abc import Sequence

from storage import environment
from storage.experience import write_shard
from storage.layout import attempt_key
from storage.ledger import find_record, put_record
from storage.object_store import ObjectStore
from storage.records import Metrics, Record, StageRecord
from storage.schemas import SAMPLES
from tasks.rollout.admission import admit
from tasks.rollout.contract import (
    FinishedGroup,
    LoadRequest,
    LoadResult,
    ReplayRequest,
    ReplayResult,
    RolloutEngine,
    RolloutRequest,
    RolloutResult,
)
from tasks.rollout.replay import replay
from tasks.rollout.shard import (
    PACKAGES,
    Stopwatch,
    check_engine,
    hold,
    in_plan_order,
    read_groups,
    samples_table,
)
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

__all__ = ["PACKAGES", "REQUESTS", "admit", "find", "run"]

REQUESTS = {
    RolloutRequest: RolloutResult,
    LoadRequest: LoadResult,
    ReplayRequest: ReplayResult,
}


def run(
    request: RolloutRequest | LoadRequest | ReplayRequest,
    store: ObjectStore,
    engine: RolloutEngine,
    *,
    workspace: Workspace,
) -> RolloutResult | LoadResult | ReplayResult:
    """Samples one shard, or returns what its record says; or loads a policy; or replays a shard.

    Writes the samples shard under a new attempt, then the record; a second call writes nothing.
    Loading and replaying (see `replay`) write nothing at all.

    Args:
        request: rows of a prompts shard, the policy to sample from, and how; or a policy; or a
            committed record with the policy that it was sampled from.
        store: where prompts and policy lie.
        engine: a sampler; it loads the policy if it holds another.
        workspace: the policy's files are cached there.

    Raises:
        Permanent: the engine was started otherwise than `request.config` says, or does not
            reproduce the learner's logprobs.
        Corrupt: prompts, policy or probe are not what their references name.
        ValueError: the prompts shard lacks the rows.
    """
    if isinstance(request, LoadRequest):
        return _load(request, store, engine, workspace=workspace)
    if isinstance(request, ReplayRequest):
        return replay(request, store, engine, workspace=workspace)
    found = find(request, store)
    if found is not None:
        return found
    check_engine(engine, request.config)
    record = _sample(request, store, engine, workspace=workspace)
    winner, _ = put_record(store, request.scope, record)
    return RolloutResult(record=winner, reused=winner.attempt != record.attempt)


def find(request: Record, store: ObjectStore) -> RolloutResult | None:
    """Returns the result of a request whose record is there: no engine is needed for it."""
    if not isinstance(request, RolloutRequest):
        return None
    found = find_record(store, request.scope, stage=request.stage, request_digest=request.digest())
    return None if found is None else RolloutResult(record=found, reused=True)


def _sample(
    request: RolloutRequest, store: ObjectStore, engine: RolloutEngine, *, workspace: Workspace
) -> StageRecord:
    """Samples the shard and writes it; returns the record that is still to be put."""
    attempt = uuid.uuid4().hex
    where = f"{request.stage} of {request.scope.prefix}"
    logger.info("%s: attempt %s, policy %d", where, attempt, request.policy.version)
    watch = Stopwatch()
    proof = hold(engine, request.policy, store=store, workspace=workspace, watch=watch)
    groups, notes = read_groups(request, store)
    watch.lap("read")
    finished = in_plan_order(groups, engine.submit(groups, sampling=request.sampling))
    watch.lap("sample")
    table = samples_table(finished, request=request)
    key = attempt_key(request.scope, attempt, f"{request.stage}.parquet")
    samples = write_shard(store, table, schema=SAMPLES, key=key)
    watch.lap("write")
    described = environment.describe(PACKAGES) | engine.environment()
    return StageRecord(
        stage=request.stage,
        request=request.body(),
        request_digest=request.digest(),
        outputs={"samples": samples},
        proof=proof,
        attempt=attempt,
        environment=described,
        environment_digest=environment.digest(described),
        timings_s=watch.laps,
        metrics=_metrics(finished, without_room=len(notes), seconds=watch.laps["sample"]),
        notes=notes,
    )


def _load(
    request: LoadRequest, store: ObjectStore, engine: RolloutEngine, *, workspace: Workspace
) -> LoadResult:
    check_engine(engine, request.config)
    watch = Stopwatch()
    return LoadResult(
        proof=hold(engine, request.policy, store=store, workspace=workspace, watch=watch)
    )


def _metrics(
    finished: Sequence[FinishedGroup], *, without_room: int, seconds: float | None
) -> Metrics:
    completions = [completion for one in finished for completion in one.completions]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    prompt_tokens = sum(len(one.group.prompt_token_ids) * len(one.completions) for one in finished)
    return {
        "num_groups": len(finished),
        "num_samples": len(completions),
        "num_prompts_without_room": without_room,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_tokens,
        "completion_tokens_mean": num_tokens / len(completions) if completions else None,
        "truncated_share": truncated / len(completions) if completions else None,
        "completion_tokens_per_s": num_tokens / seconds if seconds else None,
    }
