"""What the model and this machine allow a config to ask for, checked before an engine starts."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from flows.memory import DTYPE_BYTES, size
from flows.model import ModelFacts
from infra.home import engines_python
from tasks.reward.contract import RewardConfig

KEEPS_LENGTH = ("default", "llama3", "longrope", "su")
"""Kinds of rotary scaling whose factor is part of max_position_embeddings already."""


def check_pythons(config: RunConfig) -> None:
    """Checks that the interpreters of both engines can be started.

    Raises:
        ValueError: one is not there, or is no program.
    """
    for stage, chosen in (("rollout", config.rollout.python), ("train", config.train.python)):
        python = chosen or engines_python()
        if shutil.which(python) is None:
            raise ValueError(
                f"{stage}.python is {python!r}, which is no program here. Expected the Python "
                "interpreter of the engines' environment: run `make install`, or set it to the "
                "path of yours."
            )


def check_limits(config: RunConfig, facts: ModelFacts, *, model_dir: Path) -> list[str]:
    """Checks lengths against the model and threads against this machine.

    Returns:
        Warnings, a line each: what will work, but not as well as it could.

    Raises:
        ValueError: an engine would refuse; says what to set.
    """
    model = json.loads((model_dir / "config.json").read_text())
    _check_positions(config, facts, model)
    _check_cache(config, facts, model)
    return _check_threads(config)


def _check_positions(config: RunConfig, facts: ModelFacts, model: dict[str, Any]) -> None:
    if facts.max_positions is None:
        return
    limit = int(facts.max_positions * _stretch(model))
    for name, asked in (
        ("rollout.max_model_len", config.rollout.max_model_len),
        ("train.probe_tokens", config.train.probe_tokens),
    ):
        if asked > limit:
            raise ValueError(
                f"{name} is {asked}, but {config.model.path} has {limit} positions. Set it to "
                f"{limit} or less."
            )


def _stretch(model: dict[str, Any]) -> float:
    """Returns the factor by which rotary scaling extends what the model's config says."""
    scaling: dict[str, Any] = model.get("rope_scaling") or model.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return 1.0 if kind in KEEPS_LENGTH else max(float(scaling.get("factor") or 1.0), 1.0)


def _check_cache(config: RunConfig, facts: ModelFacts, model: dict[str, Any]) -> None:
    rollout = config.rollout
    per_token = 2 * facts.num_layers * _cached_width(facts, model) * DTYPE_BYTES[rollout.dtype]
    needed = per_token * rollout.max_model_len
    if rollout.kv_cache_bytes < needed:
        raise ValueError(
            f"rollout.kv_cache_bytes ({rollout.kv_cache_bytes}) has no room for one sequence: "
            f"{rollout.max_model_len} tokens (rollout.max_model_len) take {needed} bytes "
            f"({size(needed)}) of keys and values. Raise the first or lower the second."
        )


def _cached_width(facts: ModelFacts, model: dict[str, Any]) -> int:
    """Returns the numbers that one layer caches per token for keys (as many for values)."""
    heads = model.get("num_attention_heads")
    if not heads:
        return facts.hidden_size
    head_size = model.get("head_dim") or facts.hidden_size // heads
    return int((model.get("num_key_value_heads") or heads) * head_size)


def _check_threads(config: RunConfig) -> list[str]:
    cores = os.cpu_count() or 1
    for name, threads in (
        ("rollout.threads", config.rollout.threads),
        ("train.threads", config.train.threads),
    ):
        if threads > cores:
            raise ValueError(
                f"{name} is {threads}, but this machine has {cores} cores. Set it to {cores} or "
                "less."
            )
    together = config.train.ranks * config.train.threads
    if together > cores:
        return [
            f"warning: train.ranks x train.threads is {together} on {cores} cores; the ranks will "
            "wait for each other"
        ]
    return []


def reward_here(config: RewardConfig) -> RewardConfig:
    """Returns the config with this machine's interpreter for models that the stage serves."""
    return config.model_copy(update={"python": config.python or engines_python()})
