"""GRPO: group-relative advantages and the clipped objective, in numbers that two people share.

Sources: DeepSeekMath (arXiv 2402.03300, eq. 3) for the baseline and the clipped term; DAPO
(arXiv 2503.14476, eq. 8) for token normalisation; Dr. GRPO (arXiv 2503.20783) for the constant
length; GSPO (arXiv 2507.18071, eq. 7) for the sequence ratio. No KL term: no reference policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.train.algorithms.contract import GradedSample, LossTerms, TokenLoss, Verdict, Verdicts

if TYPE_CHECKING:
    from torch import Tensor

GROUP_BASELINE = True


class Config(BaseModel):
    """Settings of GRPO."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scale: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation (ddof 1), or leave the reward's own scale."""
    std_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation; rewards and statistics are float64."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Most weight for a token that the learner finds likelier than the sampler did."""
    mask_truncated: bool = False
    """Leave completions that hit the token limit out of the loss; they stay in the baseline."""
    normalisation: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """dapo: mean over all tokens. grpo: mean over samples of their token means. dr_grpo: sum over
    tokens divided by samples times `max_completion_tokens`."""
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    """The constant length of `dr_grpo`."""
    ratio: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    """What is clipped: each token's ratio, the geometric mean over its sample (GSPO), or the
    product over its sample."""

    @model_validator(mode="after")
    def _dr_grpo_has_a_length(self) -> Config:
        if self.normalisation == "dr_grpo" and self.max_completion_tokens is None:
            raise ValueError(
                "grpo.normalisation is 'dr_grpo' but grpo.max_completion_tokens is not set. "
                "Set it to rollout.max_tokens."
            )
        return self


def advantages(samples: Sequence[GradedSample], *, config: Config) -> Verdicts:
    """Returns a verdict per sample: (reward - group mean) / (group std + eps), in float64.

    Only graded samples make the baseline. A group with fewer than two of them is dropped
    (`too_few_graded`); equal rewards give exactly zero and stay in the denominator of the loss.

    Args:
        samples: S samples in any order; groups are told apart by `group_id` alone.
        config: settings.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    verdicts = [_ungraded(sample) for sample in samples]
    num_zero_std = 0
    for members in groups.values():
        graded = [index for index in members if samples[index].reward is not None]
        if len(graded) < 2:
            for index in graded:
                verdicts[index] = Verdict(None, kept=False, reason="too_few_graded")
            continue
        values, is_flat = _group_advantages([samples[index].reward for index in graded], config)
        num_zero_std += is_flat
        for index, value in zip(graded, values, strict=True):
            verdicts[index] = _graded(samples[index], value, config)
    return Verdicts(verdicts, num_groups=len(groups), num_zero_std_groups=num_zero_std)


def _ungraded(sample: GradedSample) -> Verdict:
    return Verdict(None, kept=False, reason=sample.status)


def _graded(sample: GradedSample, advantage: float, config: Config) -> Verdict:
    if sample.truncated and config.mask_truncated:
        return Verdict(advantage, kept=False, reason="truncated")
    return Verdict(advantage, kept=True)


def _group_advantages(rewards: Sequence[float | None], config: Config) -> tuple[list[float], bool]:
    reward_G = np.array(rewards, dtype=np.float64)
    if reward_G.min() == reward_G.max():
        return [0.0] * len(reward_G), True
    centred_G = reward_G - reward_G.mean()
    if config.scale == "std":
        centred_G = centred_G / (reward_G.std(ddof=1) + config.std_eps)
    return centred_G.tolist(), False


def sample_weights(num_tokens: Sequence[int], *, config: Config) -> np.ndarray:
    """Returns each sample's weight per unmasked token, so that the loss is a plain weighted sum.

    Taken over one whole optimizer update, before it is divided among ranks and micro-batches:
    how it is divided changes nothing.

    Args:
        num_tokens: unmasked completion tokens of each of the S kept samples; zero is allowed.
        config: settings.

    Returns:
        float64 [S]; zero for samples without tokens.
    """
    tokens_S = np.asarray(num_tokens, dtype=np.float64)
    if config.normalisation == "dapo":
        weights_S = np.full(len(tokens_S), 1.0 / max(tokens_S.sum(), 1.0))
    elif config.normalisation == "grpo":
        weights_S = 1.0 / (max(len(tokens_S), 1) * np.maximum(tokens_S, 1.0))
    else:
        assert config.max_completion_tokens is not None
        length = max(len(tokens_S), 1) * config.max_completion_tokens
        weights_S = np.full(len(tokens_S), 1.0 / length)
    return np.where(tokens_S > 0, weights_S, 0.0)


def loss(policy_logprobs: Tensor, terms: LossTerms, *, config: Config) -> TokenLoss:
    """Returns -sum of weight * w * min(ratio * A, clip(ratio) * A) over unmasked tokens.

    w = stopgrad(min(exp(old - rollout), cap)) corrects for the sampler computing other logprobs
    than the learner; ratio = exp(policy - old).

    Args:
        policy_logprobs: float32 [N], with gradient.
        terms: everything else, [N] each; values under a false mask are never read.
        config: settings.
    """
    policy = policy_logprobs
    frozen = policy.detach()
    old = frozen if terms.old_logprobs is None else terms.old_logprobs
    old = old.where(terms.mask, frozen)
    rollout = terms.rollout_logprobs.where(terms.mask, old)
    importance = (old - rollout).exp().clamp(max=config.importance_cap)
    ratio = _log_ratio(policy - old, terms, config).exp()
    clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    plain, bounded = ratio * terms.advantages, clipped_ratio * terms.advantages
    per_token = -(importance * plain.minimum(bounded) * terms.weights)
    per_token = per_token.where(terms.mask, per_token.new_zeros(()))
    clipped = (bounded < plain) & terms.mask
    return TokenLoss(per_token.sum(), per_token.detach(), clipped.detach())


def _log_ratio(token_log_ratio: Tensor, terms: LossTerms, config: Config) -> Tensor:
    if config.ratio == "token":
        return token_log_ratio
    masked = token_log_ratio.where(terms.mask, token_log_ratio.new_zeros(()))
    sums_S = masked.new_zeros(terms.num_samples).index_add(0, terms.sample_index, masked)
    if config.ratio == "sequence_sum":
        return sums_S[terms.sample_index]
    ones = terms.mask.to(masked.dtype)
    counts_S = masked.new_zeros(terms.num_samples).index_add(0, terms.sample_index, ones)
    return (sums_S / counts_S.clamp(min=1.0))[terms.sample_index]
