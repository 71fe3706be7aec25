"""The learner: a Hugging Face decoder that answers logits only where they are asked for.

Which models can be trained is decided here, by name. Nothing here knows DeepSpeed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from tasks.errors import Permanent
from tasks.train.batching import PROMPT_SEGMENT

_MOE_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_VISION_FIELDS = ("vision_config", "audio_config", "vision_tower", "image_token_id")
_LOGIT_FIELDS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Learner(nn.Module):
    """Wraps the decoder so that one call gives the logits of chosen positions.

    The wrapped model's tensors carry the prefix `causal_lm.`; everything outside this package
    uses the model's own names.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, rows: Mapping[str, Tensor], temperature: float) -> Tensor:
        """Returns float32 logits [N, V] divided by `temperature`.

        Args:
            rows: `token_ids`, `position_ids`, `segments` of shape [R, T], and `rows`, `columns`
                [N]: the positions whose logits are wanted.
            temperature: the sampler's.
        """
        hidden_RT = self.causal_lm.base_model(
            input_ids=rows["token_ids"],
            attention_mask=attention_mask(rows["segments"]),
            position_ids=rows["position_ids"],
            use_cache=False,
        ).last_hidden_state
        hidden_N = hidden_RT[rows["rows"], rows["columns"]]
        lm_head = self.causal_lm.get_output_embeddings()
        assert lm_head is not None
        logits_N_V = lm_head(hidden_N).float()
        return logits_N_V if temperature == 1.0 else logits_N_V / temperature


def attention_mask(segments_RT: Tensor) -> Tensor:
    """Returns bool [R, 1, T, T]: true where a position may look.

    Back within its own segment and at the prompt; padding sees padding, so that no row of the
    mask is empty (a softmax over nothing is NaN).
    """
    length = segments_RT.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments_RT.device).tril()
    query, key = segments_RT[:, :, None], segments_RT[:, None, :]
    return (((query == key) | (key == PROMPT_SEGMENT)) & causal)[:, None]


def build(model_dir: Path) -> PreTrainedModel:
    """Returns the architecture of `model_dir` in float32, its weights not yet set; dropout 0.

    Raises:
        Permanent: it is not a dense text decoder that the learner computes exactly.
    """
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    refuse_unsupported(config)
    for name in vars(config):
        if "dropout" in name or name.endswith("pdrop"):
            setattr(config, name, 0.0)
    with no_init_weights():
        causal_lm = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
    causal_lm.tie_weights()
    return causal_lm


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Checks that the architecture is a dense text decoder with plain logits and full attention.

    Raises:
        Permanent: it is not; the message names the field that says so.
    """
    name = (config.architectures or [type(config).__name__])[0]
    for fields, kind in (
        (_MOE_FIELDS, "a mixture of experts"),
        (_VISION_FIELDS, "a model with other inputs than text"),
    ):
        found = [field for field in fields if getattr(config, field, None) not in (None, 0, 1)]
        if found:
            raise _unsupported(name, kind, found[0])
    scaled = [field for field in _LOGIT_FIELDS if getattr(config, field, None) not in (None, 1.0)]
    if scaled:
        raise _unsupported(name, "a model that rescales its logits", scaled[0])
    if _slides(config):
        raise _unsupported(name, "a model with sliding-window attention", "sliding_window")


def _slides(config: PreTrainedConfig) -> bool:
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    return bool(getattr(config, "sliding_window", None)) and bool(
        getattr(config, "use_sliding_window", True)
    )


def _unsupported(name: str, kind: str, field: str) -> Permanent:
    return Permanent(
        f"{name} is {kind} (its config sets {field!r}). Expected a dense text decoder with full "
        "attention. Choose another model."
    )


def parameters_by_name(causal_lm: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Returns {name: parameter} in name order; tied tensors once, under their first name."""
    return dict(sorted(causal_lm.named_parameters()))


def tied_names(causal_lm: PreTrainedModel) -> dict[str, str]:
    """Returns {alias: name} of tied tensors."""
    first: dict[int, str] = {id(value): name for name, value in causal_lm.named_parameters()}
    every = causal_lm.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in every if first[id(value)] != name}


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of floating-point buffers; rotary frequencies must stay float32."""
    return {
        name: value.detach().clone()
        for name, value in module.named_buffers()
        if value.is_floating_point()
    }


def put_buffers(module: nn.Module, buffers: Mapping[str, Any]) -> None:
    """Puts buffers back as they were before the module was cast."""
    for name, value in module.named_buffers():
        if name in buffers:
            value.data = buffers[name].to(value.device)
