"""Checks a base model before anything starts: cheap to refuse here, dear an hour later."""

import math
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from tasks.errors import Permanent
from tasks.train.model import refuse_unsupported


def check(directory: Path) -> dict[str, Any]:
    """Returns what launch needs to know of a model directory.

    Keys: architecture, num_parameters, vocabulary (rows of the embedding), hidden_size,
    num_layers, max_positions, stop_token_ids.

    Raises:
        Permanent: no config, tokenizer or safetensors; a vocabulary larger than the embedding;
            NaN or Inf; not a dense text decoder.
    """
    if not (directory / "config.json").is_file():
        raise _wanting(directory, "config.json")
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    refuse_unsupported(config)
    tokenizer = _tokenizer(directory)
    num_parameters = _check_weights(directory)
    if len(tokenizer) > config.vocab_size:
        raise Permanent(
            f"The tokenizer in {directory} has {len(tokenizer)} tokens, the embedding "
            f"{config.vocab_size} rows. Expected a tokenizer of this model. Take both from one "
            "place, or resize the embedding."
        )
    return {
        "architecture": (config.architectures or [type(config).__name__])[0],
        "num_parameters": num_parameters,
        "vocabulary": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "max_positions": getattr(config, "max_position_embeddings", None),
        "stop_token_ids": _stop_token_ids(directory, config, tokenizer),
    }


def _tokenizer(directory: Path) -> Any:
    if not (directory / "tokenizer.json").is_file():
        raise Permanent(
            f"{directory} has no tokenizer.json. Expected a tokenizer in its fast form: make it "
            "with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _check_weights(directory: Path) -> int:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise _wanting(directory, "*.safetensors")
    num_parameters = 0
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dictionary, it cannot be iterated
                value = tensors.get_tensor(name)
                num_parameters += math.prod(value.shape)
                if not bool(value.isfinite().all()):
                    raise Permanent(
                        f"{name!r} in {path} holds NaN or Inf. Expected finite weights. Take the "
                        "model from its source again."
                    )
    return num_parameters


def _stop_token_ids(directory: Path, config: PreTrainedConfig, tokenizer: Any) -> list[int]:
    """Returns every id that the model, its generation config or its tokenizer ends with."""
    found: set[int] = set()
    if (directory / "generation_config.json").is_file():
        from_file, _ = PreTrainedConfig.get_config_dict(
            directory, _configuration_file="generation_config.json"
        )
        found |= _ids(from_file.get("eos_token_id"))
    found |= _ids(getattr(config, "eos_token_id", None)) | _ids(tokenizer.eos_token_id)
    if not found:
        raise Permanent(
            f"Nothing in {directory} says which token ends a completion. Expected eos_token_id in "
            "generation_config.json, config.json or the tokenizer. Set one of them."
        )
    return sorted(found)


def _ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def _wanting(directory: Path, what: str) -> Permanent:
    return Permanent(
        f"{directory} has no {what}. Expected a Hugging Face model directory as save_pretrained "
        "writes it. Set model.path to one, or add what is missing."
    )
