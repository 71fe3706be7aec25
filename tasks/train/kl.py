"""Estimators of a KL divergence from logprobs of sampled tokens, one value per token.

KL(p || q) for tokens sampled from p, with r = log p - log q of each (Schulman, "Approximating KL
Divergence", 2020). As a metric take `k3`: unbiased, never negative. As a loss only `k2` has the
gradient of the divergence itself: that of `k1` is zero in expectation, that of `k3` is p - q.
Tensor methods only; gradients flow where the arguments carry them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def k1(logprobs: "Tensor", other_logprobs: "Tensor") -> "Tensor":
    """Returns r: unbiased, of high variance, negative for single tokens."""
    return logprobs - other_logprobs


def k2(logprobs: "Tensor", other_logprobs: "Tensor") -> "Tensor":
    """Returns r^2 / 2: biased, of low variance."""
    return (logprobs - other_logprobs).square() / 2


def k3(logprobs: "Tensor", other_logprobs: "Tensor") -> "Tensor":
    """Returns e^-r - 1 + r: unbiased, of low variance, never negative."""
    log_ratio = other_logprobs - logprobs
    return log_ratio.expm1() - log_ratio
