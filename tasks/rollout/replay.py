"""Runs a committed rollout again from the store alone, and says how the stored samples compare.

Nothing here writes to the store.

`T` tokens of a completion.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from storage import environment
from storage.errors import NotFound
from storage.experience import read_shard
from storage.ledger import read_record
from storage.object_store import ObjectStore
from storage.records import StageRecord
from storage.schemas import SAMPLES
from tasks.rollout.compare import compare, is_within, tolerance_of
from tasks.rollout.contract import (
    Comparison,
    Completion,
    FinishedGroup,
    GivenCompletion,
    PromptGroup,
    ReplayRequest,
    ReplayResult,
    RolloutEngine,
    RolloutRequest,
    max_new_tokens,
    requested_config,
)
from tasks.rollout.shard import (
    PACKAGES,
    Stopwatch,
    check_engine,
    hold,
    in_plan_order,
    read_groups,
    samples_table,
)
from tasks.rollout.verdict import Evidence, judge
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Replay:
    """One committed shard with all that it was made of."""

    record: StageRecord
    request: RolloutRequest
    groups: list[PromptGroup]
    stored: pa.Table
    engine: RolloutEngine
    watch: Stopwatch

    @property
    def tolerance(self) -> float:
        """What logprobs may differ by."""
        config = self.request.config
        return tolerance_of(
            dtype=config.dtype,
            float32=config.probe_tolerance,
            temperature=self.request.sampling.temperature,
        )


def replay(
    request: ReplayRequest, store: ObjectStore, engine: RolloutEngine, *, workspace: Workspace
) -> ReplayResult:
    """Compares a committed samples shard with what its policy says now.

    Writes nothing to the store; a second call does the same work again.

    Args:
        request: the record, the policy that it was sampled from, and its prompts.
        store: opened for reading.
        engine: a sampler within the limits of the record's request; it loads the policy.
        workspace: the policy's files are cached there.

    Raises:
        Permanent: the engine has other limits, or does not reproduce the learner's logprobs.
        NotFound: record, samples or prompts are gone.
        Corrupt: one of them, the policy or its probe is not what its reference names.
        ValueError: `request` names other inputs than the record's request.
    """
    record = read_record(store, request.record)
    sampled = requested(request, record)
    check_engine(engine, sampled.config)
    logger.info("replaying %s of %s", request.record.stage, request.scope.prefix)
    watch = Stopwatch()
    stored = read_shard(store, record.outputs["samples"], schema=SAMPLES)
    groups, _ = read_groups(sampled, store)
    watch.lap("read")
    found = _Replay(record, sampled, groups, stored, engine, watch)
    try:
        hold(engine, request.policy, store=store, workspace=workspace, watch=watch)
    except NotFound as error:
        version = request.policy.version
        return _not_checked(found, f"files of policy {version} were given up or lost: {error}")
    return _result(found, _gather(found, how=request.how))


def requested(request: ReplayRequest, record: StageRecord) -> RolloutRequest:
    """Returns the request that a rollout record answers.

    Raises:
        ValueError: prompts, policy or model are not those that the record's request names.
    """
    body = record.request
    named = {
        "prompts": request.prompts.sha256,
        "policy": request.policy.digest,
        "model": request.model.digest,
    }
    other = [
        f"{name} {digest} (record: {body[name]})"
        for name, digest in named.items()
        if digest != body[name]
    ]
    if other:
        raise ValueError(
            f"A replay of {request.record.key} was asked for with {', '.join(other)}. Expected "
            "what the record's request names: the step's own prompts and the policy before it."
        )
    start, stop = body["rows"]
    return RolloutRequest(
        scope=request.scope,
        shard=int(record.stage.rpartition("-")[2]),
        prompts=request.prompts,
        start=start,
        stop=stop,
        sampling=body["sampling"],
        seed=body["seed"],
        policy=request.policy,
        model=request.model,
        config=requested_config(body),
        redo=body.get("redo", 0),
    )


def _gather(found: _Replay, *, how: Literal["regenerated", "forced"]) -> Evidence:
    """Samples the shard again, and scores the stored tokens where that did not settle it."""
    regenerated = _regenerate(found) if how == "regenerated" else None
    not_forced = _why_not_forced(found.request)
    forced = None
    if not (_is_settled(found, regenerated) or not_forced):
        forced = _force(found)
    return Evidence(
        regenerated=regenerated,
        forced=forced,
        not_forced=not_forced,
        tolerance=found.tolerance,
        dtype=found.request.config.dtype,
        promised=_promises_tokens(found.record),
        environment_changes=_environment_changes(found),
    )


def _is_settled(found: _Replay, regenerated: Comparison | None) -> bool:
    return regenerated is not None and is_within(
        regenerated, dtype=found.request.config.dtype, tolerance=found.tolerance
    )


def _promises_tokens(record: StageRecord) -> bool:
    replayable = record.request["config"]["mode"] == "replayable"
    return replayable and record.environment.get("device") == "cpu"


def _why_not_forced(request: RolloutRequest) -> str | None:
    sampling = request.sampling
    if sampling.top_p == 1.0 and not sampling.top_k:
        return None
    return (
        f"top_p {sampling.top_p} and top_k {sampling.top_k} cut the distribution, and teacher "
        "forcing scores the whole one"
    )


def _regenerate(found: _Replay) -> Comparison:
    """Samples every group again from its seed and compares all columns."""
    sampling = found.request.sampling
    finished = in_plan_order(found.groups, found.engine.submit(found.groups, sampling=sampling))
    found.watch.lap("sample")
    return compare(found.stored, samples_table(finished, request=found.request))


def _force(found: _Replay) -> Comparison:
    """Scores the stored completions, and derives all other columns from their tokens."""
    rows = found.stored.to_pylist()
    by_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_group[row["group_id"]].append(row)
    given = [
        GivenCompletion(group.prompt_token_ids, row["completion_token_ids"])
        for group in found.groups
        for row in by_group[group.group_id]
    ]
    temperature = found.request.sampling.temperature
    logprobs = iter(found.engine.score(given, temperature=temperature))
    found.watch.lap("score")
    finished = [
        FinishedGroup(
            group,
            [
                _as_sampled(row, next(logprobs), group=group, request=found.request)
                for row in by_group[group.group_id]
            ],
        )
        for group in found.groups
    ]
    return compare(found.stored, samples_table(finished, request=found.request))


def _as_sampled(
    row: dict[str, Any], logprobs_T: list[float], *, group: PromptGroup, request: RolloutRequest
) -> Completion:
    """Returns a stored completion as the engine would have ended it."""
    tokens_T: list[int] = row["completion_token_ids"]
    stops = [at for at, token in enumerate(tokens_T) if token in request.sampling.stop_token_ids]
    length = stops[0] + 1 if stops else len(tokens_T)
    if stops:
        reason = "stop"
    else:
        room = max_new_tokens(group, request.sampling, config=request.config)
        reason = "length" if length == room else f"{length} of {room} tokens"
    return Completion(
        token_ids=tokens_T[:length],
        logprobs=logprobs_T[:length],
        finish_reason=reason,
        stop_token_id=tokens_T[stops[0]] if stops else None,
    )


def _result(found: _Replay, evidence: Evidence) -> ReplayResult:
    outcome, detail = judge(evidence)
    return ReplayResult(
        stage=found.record.stage,
        outcome=outcome,
        detail=detail,
        regenerated=evidence.regenerated,
        forced=evidence.forced,
        tolerance=evidence.tolerance,
        environment_changes=evidence.environment_changes,
        timings_s=found.watch.laps,
    )


def _not_checked(found: _Replay, why: str) -> ReplayResult:
    return ReplayResult(
        stage=found.record.stage,
        outcome="not checked",
        detail=why,
        regenerated=None,
        forced=None,
        tolerance=found.tolerance,
        environment_changes=_environment_changes(found),
        timings_s=found.watch.laps,
    )


def _environment_changes(found: _Replay) -> list[str]:
    now = environment.describe(PACKAGES) | found.engine.environment()
    return environment.changes(found.record.environment, now)
