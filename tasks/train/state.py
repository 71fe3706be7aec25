"""Trainer state tensor by tensor: float32 masters, Adam's moments, its step count and the RNG.

Snapshots are safetensors files that each hold some whole tensors, so they load under any number
of ranks and either ZeRO stage, to the bit, and nothing in them is ever unpickled (DeepSpeed's own
checkpoint is pickles, and refuses another number of ranks). Every function here is a collective:
all ranks call it together.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tasks.errors import Permanent

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


def _partitions(engine: Any) -> list[Tensor]:
    """Returns this rank's flat float32 masters, the keys of the optimizer's state."""
    if engine.zero_optimization_stage() == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return engine.optimizer.single_partition_of_fp32_groups


def reset_optimizer(engine: Any) -> None:
    """Gives the optimizer zero moments and step 0, so that moments exist before the first step."""
    adam = engine.optimizer.optimizer
    for master in _partitions(engine):
        adam.state[master] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
    if engine.zero_optimization_stage() != 3:
        # Links the moments to their parameters; DeepSpeed does it only after a first step.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def num_steps(engine: Any) -> int:
    """Returns how many optimizer steps were taken since genesis."""
    return int(engine.optimizer.optimizer.state[_partitions(engine)[0]]["step"])


def set_num_steps(engine: Any, steps: int) -> None:
    """Sets the step count that Adam's bias correction depends on."""
    for master in _partitions(engine):
        engine.optimizer.optimizer.state[master]["step"] = torch.tensor(float(steps))


def set_weight(engine: Any, param: nn.Parameter, value: Tensor) -> None:
    """Sets a master from a full tensor (the same on every rank) and its cast in the model."""
    value = value.to(device=param.device, dtype=torch.float32)
    if engine.zero_optimization_stage() == 3:
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            param.data.copy_(value)
    else:
        param.data.copy_(value)
    safe_set_full_fp32_param(param, value)


def get(param: nn.Parameter, kind: str) -> Tensor:
    """Returns one full float32 tensor of the state, on the CPU."""
    if kind == MASTER:
        full = safe_get_full_fp32_param(param)
    else:
        full = safe_get_full_optimizer_state(param, kind)
    assert full is not None
    return full.detach().cpu().contiguous()


def walk(params: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yields ("kind/name", full tensor) in a fixed order."""
    for name, param in params.items():
        for kind in (MASTER, *MOMENTS):
            yield f"{kind}/{name}", get(param, kind)


def own_part(
    engine: Any, params: dict[str, nn.Parameter], *, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Returns the tensors that this rank writes: every `ranks`-th, and on rank 0 step and RNG.

    Before the first step all moments are zero and left out: two thirds of a genesis snapshot.
    """
    own: dict[str, Tensor] = {}
    untouched = num_steps(engine) == 0
    for index, (key, value) in enumerate(walk(params)):
        if index % ranks == rank and not (untouched and key.startswith(MOMENTS)):
            own[key] = value
    if rank == 0:
        own["step"] = torch.tensor([num_steps(engine)], dtype=torch.int64)
        own["rng"] = torch.get_rng_state()
    return own


def tensor_digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Returns {key: sha256 over dtype, shape and bytes}."""
    digests: dict[str, str] = {}
    for key, value in tensors.items():
        sha = hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode())
        sha.update(value.view(-1).view(torch.uint8).numpy().data)
        digests[key] = sha.hexdigest()
    return digests


def save(own: dict[str, Tensor], directory: Path, *, rank: int, ranks: int) -> None:
    """Writes this rank's snapshot file."""
    save_file(own, directory / f"state-{rank + 1:05d}-of-{ranks:05d}.safetensors")


def load(engine: Any, params: dict[str, nn.Parameter], directory: Path) -> None:
    """Takes masters, moments, step and RNG from the snapshot files in `directory`.

    Raises:
        Permanent: a tensor is missing or has another shape: not a snapshot of this model.
    """
    reset_optimizer(engine)
    files = sorted(directory.glob("state-*.safetensors"))
    where = {key: path for path in files for key in _keys(path)}
    steps = int(_read(where, "step", (1,), directory))
    for name, param in params.items():
        shape = tuple(getattr(param, "ds_shape", param.shape))
        set_weight(engine, param, _read(where, f"{MASTER}/{name}", shape, directory))
        for kind in MOMENTS if steps else ():
            value = _read(where, f"{kind}/{name}", shape, directory).to(param.device)
            safe_set_full_optimizer_state(param, value, kind)
    set_num_steps(engine, steps)
    rng = _read(where, "rng", tuple(torch.get_rng_state().shape), directory)
    torch.set_rng_state(rng)


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _read(where: dict[str, Path], key: str, shape: tuple[int, ...], directory: Path) -> Tensor:
    if key not in where:
        raise Permanent(
            f"The snapshot in {directory} has no {key!r}. Expected the whole trainer state of "
            "this model. Restore the snapshot of this run, or redo the step from another one."
        )
    with safe_open(where[key], framework="pt") as file:
        value = file.get_tensor(key)
    if tuple(value.shape) != shape:
        raise Permanent(
            f"{key!r} in the snapshot in {directory} has shape {list(value.shape)}. Expected "
            f"{list(shape)}: the snapshot is of another model."
        )
    return value
