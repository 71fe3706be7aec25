"""The memory plan: what each process of a run will take, refused if it cannot fit."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from flows.config import RunConfig
from flows.model import ModelFacts
from rewards import is_foreign, needs
from tasks.reward.contract import RewardPart

ROLLOUT_BASE_BYTES = 1_900 << 20
"""vLLM's process with no model: interpreter, torch, kernels (2.2-3.2 GB were seen at the peak)."""
TRAIN_BASE_BYTES = 700 << 20
"""One DeepSpeed rank with no model."""
CONTROLLER_BYTES = 600 << 20
WORKER_BYTES = 200 << 20
"""One reward worker with sympy loaded."""
SERVED_CACHE_BYTES = 1 << 30
"""What vLLM keeps for keys and values on a CPU unless VLLM_CPU_KVCACHE_SPACE says otherwise."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ProcessMemory:
    """What one process takes at its peak, in bytes, and why."""

    name: str
    num_bytes: int
    why: str


def memory_plan(config: RunConfig, facts: ModelFacts) -> list[ProcessMemory]:
    """Returns the estimated peak of every process that the run starts on this machine."""
    rollout = config.rollout
    weights = facts.num_parameters * DTYPE_BYTES[rollout.dtype]
    ranks = [_rank_memory(config, facts, rank) for rank in range(config.train.ranks)]
    workers = config.reward.workers * WORKER_BYTES
    return [
        ProcessMemory("controller", CONTROLLER_BYTES, "Prefect, store, tokenizer"),
        ProcessMemory("reward", workers, f"{config.reward.workers} workers"),
        *(_served_model(part.stored_name, Path(path)) for part, path in _served(config)),
        ProcessMemory(
            "rollout",
            ROLLOUT_BASE_BYTES + 2 * weights + rollout.kv_cache_bytes,
            f"2 x {size(weights)} weights (one packed), {size(rollout.kv_cache_bytes)} cache",
        ),
        *ranks,
    ]


def _served(config: RunConfig) -> list[tuple[RewardPart, str]]:
    """Returns the parts whose model the reward stage serves itself, and where it lies."""
    found = [(part, part.options.get("path")) for part in config.reward.parts]
    return [
        (part, path)
        for part, path in found
        if path and not is_foreign(part.kind) and needs(part.kind) == "endpoint"
    ]


def _served_model(name: str, directory: Path) -> ProcessMemory:
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return ProcessMemory(
        f"model of reward {name}",
        ROLLOUT_BASE_BYTES + 2 * weights + SERVED_CACHE_BYTES,
        f"2 x {size(weights)} weights (one packed), {size(SERVED_CACHE_BYTES)} cache",
    )


def _rank_memory(config: RunConfig, facts: ModelFacts, rank: int) -> ProcessMemory:
    train = config.train
    width = DTYPE_BYTES[train.dtype]
    shared = facts.num_parameters * (4 + 8 + 4) // train.ranks
    own = facts.num_parameters * width * 2
    if train.zero_stage == 3:
        own //= train.ranks
    per_token = facts.num_layers * facts.hidden_size * width * 20
    logits = facts.vocabulary * 4 * 3
    activations = train.micro_batch_tokens * (per_token + logits)
    return ProcessMemory(
        f"train rank {rank}",
        TRAIN_BASE_BYTES + shared + own + activations,
        f"{size(shared)} masters, moments and gradients, {size(own)} weights, "
        f"up to {size(activations)} for {train.micro_batch_tokens} tokens",
    )


def size(num_bytes: int) -> str:
    """Returns a number of bytes for a person."""
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    for unit, name in units:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def check_fits(plan: list[ProcessMemory]) -> str:
    """Returns the plan as one line.

    Raises:
        ValueError: this machine has less memory available than the plan takes.
    """
    total = sum(process.num_bytes for process in plan)
    available = psutil.virtual_memory().available
    parts = ", ".join(f"{process.name} {size(process.num_bytes)}" for process in plan)
    line = f"memory plan: {parts}; together {size(total)} of {size(available)} available"
    if total > available:
        reasons = "; ".join(f"{process.name}: {process.why}" for process in plan)
        raise ValueError(
            f"This run cannot fit: it takes up to {size(total)}, and {size(available)} of memory "
            f"are available ({reasons}). Lower train.micro_batch_tokens, rollout.kv_cache_bytes or "
            "the model, or free memory."
        )
    return line
