"""The covariance of advantage and log-prob over a whole batch: what Clip-Cov and KL-Cov act on."""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import TokenBatch, on_mask

ROUNDING = 1e-12  # of a mean of equal advantages, relative


def means(batches: list[TokenBatch], reduce: Reduce | None) -> dict[str, Tensor]:
    """{"tokens", "mean_A", "mean_logp"} of the whole batch, each `[...]`; means of nothing are 0."""
    sums = []
    for b in batches:
        A, logp = (on_mask(b, x.detach()).double() for x in (b.advantage, b.logp))
        sums.append(torch.stack([x.sum(-1) for x in (b.mask.double(), A, logp)]))
    n, A, logp = summed(sums, reduce)
    return {"tokens": n, "mean_A": A / n.clamp(min=1), "mean_logp": logp / n.clamp(min=1)}


def covariance(b: TokenBatch, mean_A: Tensor, mean_logp: Tensor) -> Tensor:
    """cov `[..., N]` of each token, float64; 0 where masked, or where A is its mean but for rounding."""
    A, logp = (on_mask(b, x.detach()).double() for x in (b.advantage, b.logp))
    apart = A - mean_A.unsqueeze(-1)
    apart = torch.where(b.mask & (apart.abs() > ROUNDING * A.abs()), apart, 0.0)
    return apart * (logp - mean_logp.unsqueeze(-1))


def chosen_count(rate: float, tokens: Tensor) -> Tensor:
    """max(floor(rate tokens), 1) `[...]`, int64."""
    return (rate * tokens).floor().clamp(min=1).long()
