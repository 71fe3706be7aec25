"""One trainer rank: `python -m tasks.train.worker --fd N`, commanded over an inherited socket.

Started by `ranks`, which speaks for all of them; computes with DeepSpeed and knows local files
only: no store, no stage. Devices come from DeepSpeed's accelerator; only the CPU has been run.
"""

import argparse
import logging
import os
import queue
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from storage.records import Probe
from tasks.errors import Permanent
from tasks.processes import die_with_parent
from tasks.train import state
from tasks.train.batching import MicroBatch
from tasks.train.contract import AlgorithmConfig, Deviation, TrainConfig
from tasks.train.model import (
    Learner,
    build,
    float_buffers,
    parameters_by_name,
    put_buffers,
    tied_names,
)
from tasks.train.ranks import BEAT_VARIABLE, shared_memory
from tasks.train.tally import RankResult, Tally
from tasks.train.weights import DTYPES, Weights, deviation, file_name, num_bytes, plan_files

logger = logging.getLogger(__name__)

_STARTING_SEED = 0


class Rank:
    """The model, its DeepSpeed engine, and what the parent may ask of them."""

    def __init__(self, *, model_dir: str, config: dict[str, Any], rank: int) -> None:
        self._config = TrainConfig.model_validate(config)
        self._rank = rank
        self._beat = Path(os.environ[BEAT_VARIABLE])
        torch.set_num_threads(self._config.threads)
        torch.manual_seed(_STARTING_SEED)
        accelerator = get_accelerator()
        assert accelerator is not None
        accelerator.set_device(rank)
        deepspeed.init_distributed(
            accelerator.communication_backend_name(), auto_mpi_discovery=False, verbose=False
        )
        _unlink_shared_memory(rank)
        causal_lm = build(Path(model_dir))
        if self._config.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        learner = Learner(causal_lm)
        buffers = float_buffers(learner)
        self._engine = _deepspeed_engine(learner, self._config)
        put_buffers(self._engine.module, buffers)
        self._device = torch.device(accelerator.current_device_name())
        self._tied = tied_names(causal_lm)
        self._params = parameters_by_name(causal_lm)
        self._model_config = causal_lm.config
        state.reset_optimizer(self._engine)

    def initialise(self, model_dir: str) -> None:
        """Takes weights from a Hugging Face directory; zero moments, step 0, fixed RNG."""
        source = Weights(Path(model_dir))
        source.refuse_unknown({*self._params, *self._tied})
        state.reset_optimizer(self._engine)
        torch.manual_seed(_STARTING_SEED)
        for name, param in self._params.items():
            aliases = [alias for alias, first in self._tied.items() if first == name]
            shape = tuple(getattr(param, "ds_shape", param.shape))
            state.set_weight(self._engine, param, source.read([name, *aliases], shape))

    def restore(self, directory: str) -> None:
        """Takes the state in a snapshot directory."""
        state.load(self._engine, self._params, Path(directory))

    def score(self, batches: Sequence[MicroBatch], temperature: float) -> list[NDArray[np.float32]]:
        """Returns the learner's logprobs of every completion token, without gradient."""
        self._engine.eval()
        with torch.no_grad():
            scored = [self._logprobs(batch, temperature)[0].cpu().numpy() for batch in batches]
        self._engine.train()
        return scored

    def update(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        temperature: float,
        algorithm: AlgorithmConfig,
    ) -> RankResult:
        """Takes one optimizer step over `batches`, unless loss or gradient is not finite."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        tally = Tally(algorithm)
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            logprobs_N, entropy_N = self._logprobs(batch, temperature)
            logprobs_N.retain_grad()
            loss = tally.loss(batch, logprobs_N, entropy_N)
            # DeepSpeed averages gradients over ranks; ours are shares of one sum.
            self._engine.backward(loss * self._config.ranks, scale_wrt_gas=False)
            tally.look_for_bad(batch, logprobs_N)
        self._engine.step()
        return tally.result(
            grad_norm=float(self._engine.get_global_grad_norm() or 0.0),
            skipped=bool(self._engine.optimizer.overflow),
        )

    def probe(self, token_ids: list[list[int]]) -> Probe:
        """Returns the learner's logprobs of `token_ids` at temperature 1, in the model's dtype."""
        ids_PT = torch.tensor(token_ids, device=self._device)
        num_rows, length = ids_PT.shape
        rows = {
            "token_ids": ids_PT,
            "position_ids": torch.arange(length, device=self._device).expand(num_rows, length),
            "segments": torch.zeros_like(ids_PT),
            "rows": torch.arange(num_rows, device=self._device).repeat_interleave(length),
            "columns": torch.arange(length, device=self._device).repeat(num_rows),
        }
        self._engine.eval()
        with torch.no_grad():
            logprobs_N_V = self._engine(rows, 1.0).log_softmax(-1)
        self._engine.train()
        logprobs_PTV = logprobs_N_V.view(num_rows, length, -1)
        said_PT = logprobs_PTV[:, :-1].gather(-1, ids_PT[:, 1:, None]).squeeze(-1)
        next_P = logprobs_PTV[:, -1].max(-1)
        return Probe(
            token_ids=token_ids,
            logprobs=[[None, *row] for row in said_PT.tolist()],
            next_token_ids=next_P.indices.tolist(),
            next_logprobs=next_P.values.tolist(),
        )

    def save_policy(self, directory: str, max_file_bytes: int) -> dict[str, str]:
        """Writes this rank's share of the published files; returns {alias: name}."""
        files = plan_files(
            {name: num_bytes(param, self._config.dtype) for name, param in self._params.items()},
            max_file_bytes,
        )
        for index, names in enumerate(files):
            tensors = self._published(names, keep=index % self._config.ranks == self._rank)
            if tensors:
                name = file_name(index, len(files))
                save_file(tensors, Path(directory) / name, metadata={"format": "pt"})
        return self._tied

    def save_snapshot(self, directory: str) -> dict[str, str]:
        """Writes this rank's snapshot file; returns the digests of its tensors."""
        own = self._own_state()
        state.save(own, Path(directory), rank=self._rank, ranks=self._config.ranks)
        return state.tensor_digests(own)

    def state_digests(self) -> dict[str, str]:
        """Returns the digests of this rank's share of the state."""
        return state.tensor_digests(self._own_state())

    def environment(self) -> dict[str, str]:
        """Returns the device and, on a CPU, the instructions that torch chose on it."""
        accelerator = get_accelerator()
        assert accelerator is not None
        if accelerator.device_name() == "cpu":
            return {"device": "cpu", "instructions": torch.backends.cpu.get_cpu_capability()}
        return {"device": torch.cuda.get_device_name(self._device)}

    def compare(self, published: str, before: str) -> Deviation:
        """Returns how far the masters are from published weights; see `Deviation`."""
        weights = (Weights(Path(published)), Weights(Path(before)))
        return deviation(self._params, weights, dtype=DTYPES[self._config.dtype])

    def take(self, published: str) -> None:
        """Sets every master whose cast differs from the published tensor to that tensor."""
        weights = Weights(Path(published))
        for name, param in self._params.items():
            master = state.get(param, state.MASTER)
            value = weights.read([name], tuple(master.shape))
            differs = master.to(DTYPES[self._config.dtype]).float() != value
            state.set_weight(self._engine, param, torch.where(differs, value, master))

    def vocabulary(self) -> dict[str, Any]:
        """Returns the vocabulary size and the special ids of the model's config."""
        return {
            "size": int(self._model_config.vocab_size),
            "special": _special_ids(self._model_config),
        }

    def _own_state(self) -> dict[str, Tensor]:
        return state.own_part(self._engine, self._params, rank=self._rank, ranks=self._config.ranks)

    def _published(self, names: Sequence[str], *, keep: bool) -> dict[str, Tensor]:
        params = [self._params[name] for name in names]
        if self._config.zero_stage != 3:
            return {name: self._params[name].detach().cpu() for name in names} if keep else {}
        with deepspeed.zero.GatheredParameters(params):
            if not keep:
                return {}
            return {name: self._params[name].detach().cpu().clone() for name in names}

    def _logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        rows = {
            "token_ids": self._put(batch.token_ids_RT),
            "position_ids": self._put(batch.position_ids_RT),
            "segments": self._put(batch.segments_RT),
            "rows": self._put(batch.rows_N),
            "columns": self._put(batch.columns_N),
        }
        self._beat.touch()
        logprobs_N_V = self._engine(rows, temperature).log_softmax(-1)
        with torch.no_grad():
            entropy_N = -(logprobs_N_V.exp() * logprobs_N_V).sum(-1)
        targets_N = self._put(batch.targets_N)
        return logprobs_N_V.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N

    def _put(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _unlink_shared_memory(rank: int) -> None:
    """Takes the name off DeepSpeed's all-reduce buffer, 67 MB a rank, once all have mapped it.

    DeepSpeed 0.19.8 never does, so every rank that is killed would leave it in memory for good.
    """
    dist.barrier()
    shared_memory(os.environ["MASTER_PORT"], rank).unlink(missing_ok=True)


def _deepspeed_engine(learner: Learner, config: TrainConfig) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.clip_norm,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": config.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": config.zero_stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.0,
                "betas": list(config.adam_betas),
                "eps": config.adam_eps,
                "weight_decay": config.weight_decay,
                "torch_adam": True,  # else an optimizer is compiled, for minutes
            },
        },
    }
    engine, _, _, _ = deepspeed.initialize(
        model=learner,
        model_parameters=list(learner.parameters()),  # pyright: ignore[reportArgumentType]
        config=settings,
    )
    return engine


def _special_ids(config: Any) -> list[int]:
    found: list[int] = []
    for field_name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, field_name, None)
        found.extend(value if isinstance(value, list) else [value] if value is not None else [])
    return sorted(set(found))


def _serve(connection: Connection) -> None:
    commands: queue.Queue[tuple[str, tuple[Any, ...], dict[str, Any]]] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, commands), daemon=True).start()
    rank: Rank | None = None
    while True:
        name, positional, named = commands.get()
        try:
            if rank is None:
                rank = Rank(**named)
                connection.send(("done", None))
            else:
                connection.send(("done", getattr(rank, name)(*positional, **named)))
        except Permanent as error:
            connection.send(("refused", str(error)))
        except Exception as error:
            logger.exception("rank failed in %s", name)
            connection.send(("failed", f"{type(error).__name__}: {error}"))


def _receive(connection: Connection, commands: "queue.Queue[Any]") -> None:
    """Hands commands on; ends the process as soon as the parent's end of the socket closes."""
    while True:
        try:
            commands.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def main() -> None:
    """Obeys the parent until it is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _serve(Connection(arguments.fd))


if __name__ == "__main__":
    main()
