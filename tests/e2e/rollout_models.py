"""Makes tiny models with transformers, and says what a learner would: in the engines' environment.

`python rollout_models.py OUT` writes, for every kind, `OUT/<kind>/model` (config only), the
weights `v1`, `v2` (one AdamW step away) and `other`, and `probe-<version>.json`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

VOCABULARY = 64
KINDS = {
    "llama-tied": (LlamaConfig, True),
    "llama-untied": (LlamaConfig, False),
    "qwen2-tied": (Qwen2Config, True),
    "qwen2-untied": (Qwen2Config, False),
}
LEARNING_RATE = 1e-5


def make(kind: str, directory: Path) -> None:
    family, tied = KINDS[kind]
    config = family(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    for name, seed in (("v1", 1), ("other", 2)):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    # Biases begin at zero and norms at one, so that stale ones would not show.
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        save(model, directory, name)
        if name == "v1":
            step(model)
            save(model, directory, "v2")
    config.save_pretrained(directory / "model")


def step(model: torch.nn.Module) -> None:
    ids = torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def save(model: torch.nn.Module, directory: Path, version: str) -> None:
    model.save_pretrained(directory / version)
    (directory / version / "config.json").unlink()
    (directory / version / "generation_config.json").unlink(missing_ok=True)
    for dtype in (torch.float32, torch.bfloat16):
        spoken = json.dumps(probe(model, dtype))
        (directory / f"probe-{version}-{str(dtype).removeprefix('torch.')}.json").write_text(spoken)


@torch.no_grad()
def probe(model: torch.nn.Module, dtype: torch.dtype) -> dict:
    ids = torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(7))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=ids).logits.float()
    scores = logits.log_softmax(-1)
    taken = scores[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    best = scores[:, -1].max(-1)
    return {
        "token_ids": ids.tolist(),
        "logprobs": [[None, *row] for row in taken.tolist()],
        "next_token_ids": best.indices.tolist(),
        "next_logprobs": best.values.tolist(),
    }


@torch.no_grad()
def completion_logprobs(
    model_dir: Path, weights: Path, rows: list[dict], *, temperature: float
) -> list[list[float]]:
    """Returns the learner's logprobs of every completion token, temperature applied."""
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir)).float().eval()
    state = {
        name: value
        for path in weights.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["completion"]])
        scores = (model(input_ids=ids).logits.float() / temperature).log_softmax(-1)[0]
        start = len(row["prompt"])
        found.append([scores[at - 1, ids[0, at]].item() for at in range(start, ids.shape[1])])
    return found


if __name__ == "__main__":
    for each in KINDS:
        make(each, Path(sys.argv[1]) / each)
