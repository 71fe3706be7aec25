"""A shard of six prompts and the policy to sample it from, in a store, without a model."""

from pathlib import Path
from typing import Any

from storage.experience import rows_to_table, write_shard
from storage.layout import StepScope, attempt_key
from storage.object_store import ObjectStore
from storage.policies import write_policy
from storage.records import InputRef, PolicyRef, Probe, SamplingPolicy
from storage.safetensors_files import RawTensor, write_tensors
from storage.schemas import PROMPTS
from tasks.rollout.contract import RolloutConfig, RolloutRequest

SCOPE = StepScope(run="r", step=3)
CONFIG = RolloutConfig(max_model_len=12, max_tokens=6)
SAMPLING = SamplingPolicy(group_size=2, temperature=1.0, max_tokens=6, stop_token_ids=[1])
LENGTHS = [2, 3, 12, 4, 10, 1]
"""Prompt lengths; the third leaves no room, the fifth leaves two tokens."""


def policy_in(store: ObjectStore, directory: Path, *, value: int, version: int) -> PolicyRef:
    folder = directory / f"weights-{value}"
    write_tensors(folder, {"w": RawTensor("F32", (1,), bytes([value] * 4))}, max_file_bytes=100)
    probe = Probe(
        token_ids=[[1, 2]], logprobs=[[None, -1.0]], next_token_ids=[3], next_logprobs=[-1.0]
    )
    return write_policy(
        store,
        folder,
        scope=SCOPE,
        attempt=f"v{version}",
        version=version,
        dtype="float32",
        tied={},
        probe=probe,
        cache=None,
    )


def request_in(store: ObjectStore, directory: Path, **changes: Any) -> RolloutRequest:
    rows = [
        {
            "prompt_id": f"p{row}",
            "group_id": f"g{row}",
            "domain": "test",
            "prompt_token_ids": [20 + row] * length,
        }
        for row, length in enumerate(LENGTHS)
    ]
    key = attempt_key(SCOPE, "prompts", "prompts.parquet")
    prompts = write_shard(store, rows_to_table(rows, schema=PROMPTS), schema=PROMPTS, key=key)
    fields: dict[str, Any] = {
        "scope": SCOPE,
        "shard": 1,
        "prompts": prompts,
        "start": 0,
        "stop": len(LENGTHS),
        "sampling": SAMPLING,
        "seed": 1000,
        "policy": policy_in(store, directory, value=1, version=5),
        "model": InputRef(digest="m" * 64, files={}),
        "config": CONFIG,
    }
    return RolloutRequest(**(fields | changes))
