"""The warm trainer: turns updates into micro-batches for the ranks and their answers into figures.

Keyed by the state id that it holds. Local files only: the stage fetches and stores them.
"""

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.records import Metrics, Probe
from tasks.errors import Permanent, Transient
from tasks.train import build
from tasks.train.algorithms import ALGORITHMS
from tasks.train.batching import MicroBatch, divide_rows, pack_rows
from tasks.train.batching import build as build_micro_batch
from tasks.train.contract import Deviation, TrainConfig, TrainSample, Update, UpdateResult
from tasks.train.ranks import Ranks
from tasks.workspace import Workspace

logger = logging.getLogger(__name__)

_BUILT_IN = (
    "dtype",
    "ranks",
    "zero_stage",
    "threads",
    "gradient_checkpointing",
    "clip_norm",
    "adam_betas",
    "adam_eps",
    "weight_decay",
)
"""What the ranks are started with; another value means other ranks."""
_NAMED_SAMPLES = 8


def start(config: dict[str, Any], *, model_dir: Path, workspace: Workspace) -> "Engine":
    """Returns a trainer whose ranks run and hold no weights yet.

    Args:
        config: a TrainConfig as JSON.
        model_dir: config.json of the model; its weights need not be there.
        workspace: compiled ops go to its cache, logs to its scratch.

    Raises:
        Permanent: the model is not supported, or DeepSpeed cannot be built.
    """
    engine = Engine(TrainConfig.model_validate(config), model_dir=model_dir, workspace=workspace)
    engine.open()
    return engine


class Engine:
    """A TrainEngine over DeepSpeed ranks; a rank that dies costs the state, not the engine."""

    def __init__(self, config: TrainConfig, *, model_dir: Path, workspace: Workspace) -> None:
        self._config = config
        self._model_dir = model_dir
        self._workspace = workspace
        self._ranks: Ranks | None = None
        self._state_id: str | None = None
        self._has_weights = False
        self._num_commands = 0

    @property
    def state_id(self) -> str | None:
        """Whose trainer state the engine holds; None if fresh, dirty, or its ranks have ended."""
        return self._state_id if self.pids else None

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._ranks.pids if self._ranks and not self._ranks.closed else []

    def progress(self) -> int:
        """Returns a number that grows with every command and every micro-batch of the ranks."""
        ranks = self._ranks
        return self._num_commands + (ranks.progress() if ranks else 0)

    def serves(self) -> tuple[int, str] | None:
        """Returns None: a trainer serves no policy."""
        return None

    def open(self) -> Ranks:
        """Returns the ranks, started if none run."""
        if self._ranks is None or self._ranks.closed:
            self._has_weights = False
            extensions = build.ensure(self._workspace.cache)
            self._ranks = Ranks(
                self._config,
                model_dir=self._model_dir,
                extensions=extensions,
                log_dir=self._workspace.scratch / "ranks",
            )
        return self._ranks

    def configure(self, config: TrainConfig) -> None:
        """Takes another config; the state moves along, to other ranks if those must change."""
        old, held, self._config = self._config, self.state_id, config
        if all(getattr(old, name) == getattr(config, name) for name in _BUILT_IN):
            return
        logger.info("train config changed; restarting the ranks")
        directory = Path(tempfile.mkdtemp(dir=self._workspace.scratch))
        # Named or not: in a replay, the state between two steps has no name.
        moves = bool(self.pids) and self._has_weights
        if moves:
            self._call("save_snapshot", str(directory))
        self.close()
        if moves:
            self.restore(directory)
            self._state_id = held
        shutil.rmtree(directory)

    def initialise(self, model_dir: Path) -> None:
        """Takes weights from a Hugging Face directory, fresh optimizer. State id stays None.

        Raises:
            Permanent: weights missing, of another shape, or not finite.
        """
        self._state_id = None
        self.open()
        self._call("initialise", str(model_dir))
        self._has_weights = True

    def restore(self, snapshot_dir: Path) -> None:
        """Takes masters, moments and RNG from a snapshot directory. State id stays None.

        Raises:
            Permanent: it is not a snapshot of this model.
        """
        self._state_id = None
        self.open()
        self._call("restore", str(snapshot_dir))
        self._has_weights = True

    def environment(self) -> dict[str, str]:
        """Returns what the bits depend on besides the request and the installed packages."""
        return self._call("environment")[0]

    def compare(self, published: Path, before: Path) -> Deviation:
        """Compares the masters with published safetensors; `before` is the version before."""
        return self._call("compare", str(published), str(before))[0]

    def take(self, published: Path) -> None:
        """Sets masters whose cast differs from `published` to it. State id becomes None."""
        self._state_id = None
        self._call("take", str(published))

    def adopt(self, state_id: str) -> None:
        """Declares what the engine now holds, once the record that names it is stored."""
        self._state_id = state_id

    def update(self, updates: Sequence[Update], *, temperature: float) -> UpdateResult:
        """Runs the optimizer updates in order. State id becomes None.

        With one update the old logprobs are the policy's own; with several they are computed
        once, before the first.

        Raises:
            Permanent: NaN or Inf in loss or gradient: that update changed nothing, samples are
                named.
            Transient: a rank died.
        """
        self._state_id = None
        old = self._score(updates, temperature) if len(updates) > 1 else None
        learner: dict[str, NDArray[np.float32]] = dict(old or {})
        totals: list[dict[str, float]] = []
        for index, update in enumerate(updates):
            batches = self._divide(update.samples, old)
            answers = self._held().call_each(
                "update",
                batches,
                learning_rate=update.learning_rate,
                temperature=temperature,
                algorithm=self._config.algorithm,
            )
            self._refuse_skipped(answers, index, update)
            if old is None:
                learner.update(_by_sample(batches, [answer.logprobs for answer in answers]))
            totals.append(_figures(answers))
        metrics = {**_average(totals), "learning_rate": updates[-1].learning_rate}
        return UpdateResult({key: value.tolist() for key, value in learner.items()}, metrics)

    def save_policy(self, directory: Path, *, max_file_bytes: int) -> dict[str, str]:
        """Writes safetensors of the published dtype; returns tied tensors {alias: name}."""
        return self._call("save_policy", str(directory), max_file_bytes)[0]

    def probe(self, token_ids: list[list[int]]) -> Probe:
        """Returns the learner's logprobs of `token_ids` under the published weights."""
        return self._call("probe", token_ids)[0]

    def save_snapshot(self, directory: Path) -> str:
        """Writes masters, moments, step count and RNG; returns the state digest."""
        return _state_digest(self._call("save_snapshot", str(directory)))

    def state_digest(self) -> str:
        """Returns the digest over masters, moments, step count and RNG, however divided."""
        return _state_digest(self._call("state_digests"))

    def vocabulary(self) -> tuple[int, list[int]]:
        """Returns the size of the vocabulary and the ids that a probe avoids."""
        answer = self._call("vocabulary")[0]
        return answer["size"], answer["special"]

    def close(self) -> None:
        """Ends the ranks. Safe to call twice; the next call that needs them starts others."""
        self._state_id = None
        if self._ranks:
            self._ranks.close()
            self._ranks = None

    def _call(self, name: str, *positional: Any) -> list[Any]:
        self._num_commands += 1
        return self._held().call(name, *positional)

    def _held(self) -> Ranks:
        if self._ranks is None or self._ranks.closed:
            raise Transient(
                "The trainer has no ranks: they ended in an earlier call. Expected initialise or "
                "restore first; the next attempt does that."
            )
        return self._ranks

    def _score(
        self, updates: Sequence[Update], temperature: float
    ) -> dict[str, NDArray[np.float32]]:
        distinct = {sample.sample_id: sample for update in updates for sample in update.samples}
        batches = self._divide(list(distinct.values()), None)
        return _by_sample(
            batches, self._held().call_each("score", batches, temperature=temperature)
        )

    def _divide(
        self, samples: Sequence[TrainSample], old: dict[str, NDArray[np.float32]] | None
    ) -> list[list[MicroBatch]]:
        """Returns each rank's micro-batches of one update."""
        weights = self._weights(samples)
        rows = pack_rows(samples, max_row_tokens=self._config.max_row_tokens)
        divided = divide_rows(
            rows, ranks=self._config.ranks, micro_batch_tokens=self._config.micro_batch_tokens
        )
        return [
            [build_micro_batch(cut, weights=weights, old_logprobs=old) for cut in mine]
            for mine in divided
        ]

    def _weights(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        algorithm = ALGORITHMS[self._config.algorithm.kind]
        config = algorithm.Config.model_validate(self._config.algorithm.options)
        counts = [sum(sample.loss_mask) for sample in samples]
        weights_S = algorithm.sample_weights(counts, config=config).tolist()
        return {sample.sample_id: weight for sample, weight in zip(samples, weights_S, strict=True)}

    def _refuse_skipped(self, answers: Sequence[Any], index: int, update: Update) -> None:
        if not any(answer.skipped for answer in answers):
            return
        named = [sample_id for answer in answers for sample_id in answer.bad_samples]
        named = named or [sample.sample_id for sample in update.samples]
        more = f" and {len(named) - _NAMED_SAMPLES} more" if len(named) > _NAMED_SAMPLES else ""
        raise Permanent(
            f"Loss or gradient of optimizer update {index} is NaN or Inf, from samples "
            f"{', '.join(named[:_NAMED_SAMPLES])}{more}. Expected finite numbers; the weights "
            "were not changed by it. Look at these samples' rollout_logprobs and advantages, or "
            "lower the learning rate."
        )


def _by_sample(
    batches: Sequence[Sequence[MicroBatch]], logprobs: Sequence[Sequence[NDArray[np.float32]]]
) -> dict[str, NDArray[np.float32]]:
    return {
        sample_id: values
        for mine, said in zip(batches, logprobs, strict=True)
        for batch, values_N in zip(mine, said, strict=True)
        for sample_id, values in batch.by_sample(values_N)
    }


def _figures(answers: Sequence[Any]) -> dict[str, float]:
    """Returns one update's figures over all ranks."""
    sums = {name: sum(answer.sums[name] for answer in answers) for name in answers[0].sums}
    tokens = max(sums["tokens"], 1.0)
    return {
        "loss": sums["loss"],
        "grad_norm": answers[0].grad_norm,
        "clip_fraction": sums["clipped"] / tokens,
        "logprob_gap_mean": sums["gap"] / tokens,
        "rollout_kl": sums["kl"] / tokens,
        "ratio_max": max(answer.max_ratio for answer in answers),
        "entropy": sums["entropy"] / tokens,
        "tokens": sums["tokens"],
    }


def _average(totals: Sequence[dict[str, float]]) -> Metrics:
    averaged: Metrics = {
        name: float(np.mean([figures[name] for figures in totals])) for name in totals[0]
    }
    averaged["ratio_max"] = max(figures["ratio_max"] for figures in totals)
    averaged["tokens"] = sum(figures["tokens"] for figures in totals)
    averaged["updates"] = float(len(totals))
    return averaged


def _state_digest(parts: Sequence[dict[str, str]]) -> str:
    """Hashes the tensors' digests in name order, so that who holds which does not matter."""
    lines = sorted(f"{key} {digest}" for part in parts for key, digest in part.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
