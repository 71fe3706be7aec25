"""Adds up one optimizer update on one rank: its loss, its figures, and which samples broke it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.train import kl
from tasks.train.algorithms import ALGORITHMS
from tasks.train.algorithms.contract import LossTerms
from tasks.train.batching import MicroBatch
from tasks.train.contract import AlgorithmConfig


@dataclass(frozen=True)
class RankResult:
    """What one rank's micro-batches gave in one update; sums are over unmasked tokens.

    `skipped` means that gradient or loss was not finite and the weights did not change;
    `bad_samples` are the samples of this rank that show why.
    """

    logprobs: list[NDArray[np.float32]]
    sums: dict[str, float]
    max_ratio: float
    grad_norm: float
    skipped: bool
    bad_samples: list[str] = field(default_factory=list)


class Tally:
    """Adds up what the micro-batches of one update say, without waiting for the device."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = ALGORITHMS[algorithm.kind]
        self._config = self._algorithm.Config.model_validate(algorithm.options)
        self._logprobs: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._max_ratios: list[Tensor] = []
        self._per_token: Tensor | None = None
        self._bad: list[tuple[MicroBatch, Tensor]] = []

    def loss(self, batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
        """Returns the micro-batch's share of the loss; NaN wherever it is not finite.

        Infinite must not pass as a finite gradient: DeepSpeed leaves out an update only when its
        gradient norm is not finite on any rank, and so weights stay as they were.
        """
        terms = _terms(batch, logprobs_N.device)
        told = self._algorithm.loss(logprobs_N, terms, config=self._config)
        frozen_N = logprobs_N.detach()
        old_N = frozen_N if terms.old_logprobs is None else terms.old_logprobs
        gap_N = (old_N - terms.rollout_logprobs).where(terms.mask, old_N.new_zeros(()))
        mask_N = terms.mask.float()
        self._sums.append(
            torch.stack(
                [
                    told.loss.detach(),
                    told.clipped.float().sum(),
                    gap_N.abs().sum(),
                    kl.k3(-gap_N, gap_N.new_zeros(())).sum(),
                    (entropy_N * mask_N).sum(),
                    mask_N.sum(),
                ]
            )
        )
        self._max_ratios.append(gap_N.max().exp())
        self._logprobs.append(frozen_N)
        self._per_token = told.per_token
        return told.loss * (told.loss.detach() * 0 + 1)  # times 1, or NaN

    def look_for_bad(self, batch: MicroBatch, logprobs_N: Tensor) -> None:
        """Remembers tokens whose loss or gradient is not finite; call after backward."""
        assert self._per_token is not None
        fine_N = self._per_token.isfinite() & logprobs_N.detach().isfinite()
        self._bad.append((batch, ~fine_N))

    def result(self, *, grad_norm: float, skipped: bool) -> RankResult:
        """Returns the totals; the first wait for the device."""
        names = ("loss", "clipped", "gap", "kl", "entropy", "tokens")
        totals = torch.stack(self._sums).double().sum(0).tolist()
        return RankResult(
            logprobs=[values.float().cpu().numpy() for values in self._logprobs],
            sums=dict(zip(names, totals, strict=True)),
            max_ratio=float(torch.stack(self._max_ratios).max()),
            grad_norm=grad_norm,
            skipped=skipped,
            bad_samples=self._bad_samples() if skipped else [],
        )

    def _bad_samples(self) -> list[str]:
        found: dict[str, None] = {}
        for batch, bad_N in self._bad:
            for sample_id, values in batch.by_sample(bad_N.cpu().numpy()):
                if values.any():
                    found[sample_id] = None
        return list(found)


def _terms(batch: MicroBatch, device: torch.device) -> LossTerms:
    def put(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return LossTerms(
        old_logprobs=None if batch.old_logprobs_N is None else put(batch.old_logprobs_N),
        rollout_logprobs=put(batch.rollout_logprobs_N),
        advantages=put(batch.advantages_N),
        weights=put(batch.weights_N),
        mask=put(batch.mask_N),
        sample_index=put(batch.sample_index_N),
        num_samples=max(len(batch.sample_ids), 1),
    )
