"""Runs in the engines' environment: does what `lab` asks, one pickled call at a time."""

import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from infra.home import home
from storage.objects import cache_path
from storage.opening import open_store
from storage.policies import policy_digest
from storage.store_config import StoreConfig
from tasks.train import engine as train_engine
from tasks.train import kl, stage
from tasks.train.algorithms import ALGORITHMS
from tasks.train.algorithms.contract import LossTerms
from tasks.train.batching import build, divide_rows, pack_rows
from tasks.train.contract import TrainConfig, TrainSample
from tasks.train.model import Learner, refuse_unsupported
from tasks.train.model import build as build_model
from tasks.train.origins import addition
from tasks.train.origins.checking import check
from tasks.workspace import Workspace

ENGINES: dict[str, Any] = {}


def loss(kind: str, options: dict, dtype: str, terms: dict) -> dict:
    """Returns loss, gradient in the policy's logprobs, per-token losses and clipped tokens."""
    algorithm = ALGORITHMS[kind]
    floats = {"dtype": getattr(torch, dtype)}
    policy = torch.tensor(terms["policy"], **floats, requires_grad=True)
    old = terms.get("old")
    told = algorithm.loss(
        policy,
        LossTerms(
            old_logprobs=None if old is None else torch.tensor(old, **floats),
            rollout_logprobs=torch.tensor(terms["rollout"], **floats),
            advantages=torch.tensor(terms["advantages"], **floats),
            weights=torch.tensor(terms["weights"], **floats),
            mask=torch.tensor(terms["mask"]),
            sample_index=torch.tensor(terms["sample_index"]),
            num_samples=max(terms["sample_index"]) + 1,
        ),
        config=algorithm.Config.model_validate(options),
    )
    told.loss.backward()
    assert policy.grad is not None
    return {
        "loss": told.loss.item(),
        "gradient": policy.grad.tolist(),
        "per_token": told.per_token.tolist(),
        "clipped": told.clipped.tolist(),
    }


def kl_of(estimator: str, logprob: float, other: float, dtype: str) -> float:
    """Returns one token's estimate."""
    floats = {"dtype": getattr(torch, dtype)}
    return getattr(kl, estimator)(
        torch.tensor(logprob, **floats), torch.tensor(other, **floats)
    ).item()


def kl_in_expectation(estimator: str, p: list[float], q: list[float]) -> tuple[float, list[float]]:
    """Returns E_p[estimate] and its gradient in p's logits, exactly, over all tokens."""
    logits = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    estimates = getattr(kl, estimator)(logprobs, torch.tensor(q, dtype=torch.float64).log())
    expected = (logprobs.detach().exp() * estimates).sum()
    expected.backward()
    assert logits.grad is not None
    return expected.item(), logits.grad.tolist()


def make_model(directory: Path, family: str, tied: bool) -> None:
    """Saves a tiny random decoder."""
    torch.manual_seed(0)
    common = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "attention_dropout": 0.5,
        "initializer_range": 0.3,
    }
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig}[family](**common)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def spoil(directory: Path, name: str, value: float) -> None:
    """Sets the first number of a tensor in a saved model."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.get_parameter(name).data.view(-1)[0] = value
    model.save_pretrained(directory)


def refusal(fields: dict) -> str:
    """Returns why a config with these fields is refused; empty if it is not."""
    config = LlamaConfig(architectures=["SomeForCausalLM"])
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        refuse_unsupported(config)
    except train_engine.Permanent as error:
        return str(error)
    return ""


def dropout_of(directory: Path) -> float:
    """Returns the attention dropout that a learner of this model runs with."""
    return build_model(directory).config.attention_dropout


def logits_head(logits: list[list[float]], temperature: float) -> list[list[float]]:
    """Returns logprobs as the learner takes them from logits that the model gave."""

    class Given(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = lambda **_: torch.nn.Module()

        def get_output_embeddings(self) -> Callable[..., torch.Tensor]:
            return lambda hidden: hidden

    given = Given()
    hidden = torch.tensor([logits])

    class Output:
        last_hidden_state = hidden

    given.base_model = lambda **_: Output
    length = len(logits)
    rows = {
        "token_ids": torch.zeros(1, length, dtype=torch.long),
        "position_ids": torch.arange(length)[None],
        "segments": torch.zeros(1, length, dtype=torch.long),
        "rows": torch.zeros(length, dtype=torch.long),
        "columns": torch.arange(length),
    }
    return Learner(given)(rows, temperature).log_softmax(-1).tolist()  # type: ignore[arg-type]


def packed_logprobs(
    directory: Path, samples: list[TrainSample], limits: dict, temperature: float
) -> dict[str, list[float]]:
    """Returns learner logprobs by sample, packed and batched as the engine does it."""
    causal_lm = AutoModelForCausalLM.from_pretrained(directory)
    learner = Learner(causal_lm)
    weights = {sample.sample_id: 0.0 for sample in samples}
    rows = pack_rows(samples, max_row_tokens=limits["max_row_tokens"])
    divided = divide_rows(rows, ranks=1, micro_batch_tokens=limits["micro_batch_tokens"])
    said: dict[str, list[float]] = {}
    for cut in divided[0]:
        batch = build(cut, weights=weights)
        tensors = {
            "token_ids": torch.from_numpy(batch.token_ids_RT),
            "position_ids": torch.from_numpy(batch.position_ids_RT),
            "segments": torch.from_numpy(batch.segments_RT),
            "rows": torch.from_numpy(batch.rows_N),
            "columns": torch.from_numpy(batch.columns_N),
        }
        with torch.no_grad():
            logprobs = learner(tensors, temperature).log_softmax(-1)
        taken = logprobs.gather(-1, torch.from_numpy(batch.targets_N)[:, None]).squeeze(-1)
        said.update({key: value.tolist() for key, value in batch.by_sample(taken.numpy())})
    return said


def lone_logprobs(
    directory: Path, samples: list[TrainSample], temperature: float
) -> dict[str, list[float]]:
    """Returns learner logprobs by sample, each alone, unpadded, through the model's own forward."""
    causal_lm = AutoModelForCausalLM.from_pretrained(directory)
    said: dict[str, list[float]] = {}
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
        with torch.no_grad():
            logprobs = (causal_lm(ids).logits[0].float() / temperature).log_softmax(-1)
        first = len(sample.prompt_token_ids)
        taken = logprobs[first - 1 : -1].gather(-1, ids[0, first:, None]).squeeze(-1)
        said[sample.sample_id] = taken.tolist()
    return said


def loaded_logits(directory: Path, token_ids: list[int]) -> list[list[float]]:
    """Returns logits of a saved policy as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float().tolist()


def open_engine(name: str, config: TrainConfig, model_dir: Path, scratch: Path) -> list[int]:
    """Starts a trainer; returns its ranks' process ids."""
    scratch = scratch / name
    scratch.mkdir(parents=True, exist_ok=True)
    # The product's own cache: compiled ops take a minute to make.
    workspace = Workspace(cache=home() / "cache", scratch=scratch)
    engine = train_engine.start(
        config.model_dump(mode="json"), model_dir=model_dir, workspace=workspace
    )
    ENGINES[name] = (engine, workspace)
    return engine.pids


def close_engine(name: str) -> None:
    """Ends a trainer."""
    ENGINES.pop(name)[0].close()


def engine(name: str, method: str, *positional: Any, **named: Any) -> Any:
    """Calls a trainer, or reads one of its properties."""
    found = getattr(ENGINES[name][0], method)
    return found(*positional, **named) if callable(found) else found


def masters(directory: Path) -> dict[str, np.ndarray]:
    """Returns the float32 masters in a snapshot directory."""
    found: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        for key, value in load_file(path).items():
            if key.startswith("master/"):
                found[key] = value.numpy()
    return found


def check_error(directory: Path) -> str:
    """Returns why a model directory is refused."""
    try:
        check(directory)
    except train_engine.Permanent as error:
        return str(error)
    return ""


def save_addition_tokenizer(directory: Path) -> None:
    """Saves a tokenizer of 14 tokens beside a model."""
    addition.make_tokenizer().save_pretrained(directory)


def addition_pairs() -> list[tuple[int, int]]:
    """Returns what the supervised start draws from."""
    return addition.training_pairs()


def addition_tokens(text: str) -> dict:
    """Returns a text's token ids, the text back from them, and the size of the vocabulary."""
    tokenizer = addition.make_tokenizer()
    ids = tokenizer.encode(text)
    return {"ids": ids, "text": tokenizer.decode(ids), "size": len(tokenizer)}


def short_supervised_start(directory: Path) -> str:
    """Returns the digest of the addition model after a few steps of its supervised start."""
    steps, addition._STEPS = addition._STEPS, 5
    addition.make("builtin:addition", directory, threads=1, say=lambda line: None)
    addition._STEPS = steps
    return policy_digest(directory)


def forget_cached(digests: list[str]) -> None:
    """Drops objects from this host's cache."""
    for digest in digests:
        cache_path(home() / "cache", digest).unlink(missing_ok=True)


def run_stage(name: str, store_uri: str, request: Any) -> Any:
    """Runs the train stage on a trainer."""
    held, workspace = ENGINES[name]
    store = open_store(StoreConfig(uri=store_uri), writing=True)
    return stage.run(request, store, held, workspace=workspace)


def main() -> None:
    answers = sys.stdout.buffer
    # What libraries print must not land among the answers.
    sys.stdout = sys.stderr
    while True:
        try:
            function, positional, named = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = (True, globals()[function](*positional, **named))
        except Exception as error:
            traceback.print_exc()
            answer = (False, error)
        pickle.dump(answer, answers)
        answers.flush()
    for name in list(ENGINES):
        close_engine(name)


if __name__ == "__main__":
    main()
