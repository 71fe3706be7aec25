"""Weights as Hugging Face directories hold them: how they are read, and divided among files."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tasks.errors import Permanent
from tasks.train import state
from tasks.train.contract import Deviation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Weights:
    """The safetensors files of a Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._where: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._where.update(dict.fromkeys(file.keys(), path))

    def refuse_unknown(self, known: set[str]) -> None:
        """Checks that the files hold nothing that the architecture does not have."""
        extra = sorted(name for name in self._where if name not in known)
        extra = [name for name in extra if not name.endswith("inv_freq")]
        if extra:
            raise Permanent(
                f"{self._directory} holds tensors that its config.json has no place for: "
                f"{extra[:5]}. Expected the weights of that architecture. Export the model again."
            )

    def read(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor under the first of `names` that is there, in float32."""
        found = [name for name in names if name in self._where]
        if not found:
            raise Permanent(
                f"{self._directory} has no tensor {names[0]!r}. Expected the whole model as "
                "*.safetensors. Export it again with save_pretrained."
            )
        with safe_open(self._where[found[0]], framework="pt") as file:
            value = file.get_tensor(found[0])
        if tuple(value.shape) != shape:
            raise Permanent(
                f"{found[0]!r} in {self._directory} has shape {list(value.shape)}. Expected "
                f"{list(shape)}, which config.json says."
            )
        if not bool(value.isfinite().all()):
            raise Permanent(
                f"{found[0]!r} in {self._directory} holds NaN or Inf. Expected finite weights. "
                "Take the model from its source again."
            )
        return value.float()


def deviation(
    params: dict[str, nn.Parameter], weights: tuple[Weights, Weights], *, dtype: torch.dtype
) -> Deviation:
    """Returns how far the masters of `params`, cast to `dtype`, are from published weights.

    A collective: all ranks call it together.

    Args:
        params: by the names that the files use.
        weights: the published version, and the one before it.
        dtype: of the published tensors.
    """
    published, before = weights
    total = differing = 0
    largest = diff_sum = change_sum = 0.0
    for name, param in params.items():
        mine = state.get(param, state.MASTER).to(dtype).float()
        shape = tuple(mine.shape)
        theirs, earlier = published.read([name], shape), before.read([name], shape)
        diff, change = (mine - theirs).abs(), (theirs - earlier).abs()
        total += diff.numel()
        differing += int((diff != 0).sum())
        largest = max(largest, float(diff.max()))
        diff_sum += float(diff.double().sum())
        change_sum += float(change.double().sum())
    return Deviation(
        num_elements=differing,
        max_abs_diff=largest,
        mean_abs_diff=diff_sum / total,
        mean_abs_change=change_sum / total,
    )


def num_bytes(param: Tensor, dtype: str) -> int:
    """Returns the bytes of a published tensor, gathered or not."""
    return int(getattr(param, "ds_numel", param.numel())) * DTYPES[dtype].itemsize


def plan_files(sizes: dict[str, int], max_file_bytes: int) -> list[list[str]]:
    """Returns the tensors of each file: in order, none past the limit unless it is alone."""
    files: list[list[str]] = [[]]
    used = 0
    for name, num_bytes in sizes.items():
        if files[-1] and used + num_bytes > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += num_bytes
    return files


def file_name(index: int, count: int) -> str:
    """Returns the name that transformers and vLLM look for."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
