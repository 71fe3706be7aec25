"""The words that an algorithm file speaks: what it is given and what it answers.

The algorithms themselves lie beside this file; the dictionary of them is in `__init__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic import BaseModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GradedSample:
    """What an advantage may depend on.

    `reward` is None unless `status` is `graded`; `group_id` is made per drawn prompt, never from
    its text; `truncated` means that the completion hit the token limit.
    """

    sample_id: str
    group_id: str
    status: str
    reward: float | None
    truncated: bool = False


@dataclass(frozen=True)
class Verdict:
    """What the algorithm made of one sample: an advantage, and whether it enters the loss.

    `reason` says why a sample is not kept; `advantage` is None where the sample has none.
    """

    advantage: float | None
    kept: bool
    reason: str | None = None


@dataclass(frozen=True)
class Verdicts:
    """One verdict per sample, in order, and how many groups carry no signal."""

    verdicts: list[Verdict]
    num_groups: int
    num_zero_std_groups: int


@dataclass(frozen=True)
class LossTerms:
    """What the loss of N completion tokens depends on besides the policy; all of shape [N].

    `old_logprobs` None means one update per experience: old = stopgrad(policy). `weights` are the
    tokens' shares in the loss of the whole update. `sample_index` says which of `num_samples`
    samples a token belongs to; the tokens of a sample are always together.
    """

    old_logprobs: Tensor | None
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    sample_index: Tensor
    num_samples: int


@dataclass(frozen=True)
class TokenLoss:
    """`loss` (scalar) to go backward from, the weighted loss per token and which were clipped."""

    loss: Tensor
    per_token: Tensor
    clipped: Tensor


class Algorithm(Protocol):
    """One file of this folder."""

    @property
    def Config(self) -> type[BaseModel]:
        """The file's settings."""
        ...

    @property
    def GROUP_BASELINE(self) -> bool:
        """Needs groups of at least two; equal rewards give zero advantage."""
        ...

    def advantages(self, samples: Sequence[GradedSample], *, config: Any) -> Verdicts:
        """Returns a verdict per sample."""
        ...

    def sample_weights(self, num_tokens: Sequence[int], *, config: Any) -> np.ndarray:
        """Returns each sample's weight per unmasked token, over one whole optimizer update."""
        ...

    def loss(self, policy_logprobs: Tensor, terms: LossTerms, *, config: Any) -> TokenLoss:
        """Returns the weighted loss of the tokens given."""
        ...
