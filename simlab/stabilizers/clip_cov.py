"""Clip-Cov: S = M min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), M drops a few tokens of high covariance, r = pi/mu.

Source: the entropy mechanism of RL (2505.22617), official code in verl (clip_cov).

cov = (A - mean A)(log pi - mean log pi), with the means over the active tokens of the whole batch; verl takes
those of the micro-batch, so that its answer depends on the cut. Of the tokens with low < cov < high that the
clip leaves alone, max(floor(rate n), 1) of the n active tokens are dropped at random: those of smallest `uniform`.
A tiny batch therefore loses a token whenever it has a candidate.

Gradient weight on grad log pi: r A, 0 where dropped or where the clip binds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.core.covariance import chosen_count, covariance, means
from simlab.core.quantile import Reduce, order_statistic, summed
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import RadiusHigh, RadiusLow, Share, clipped


def candidates(
    b: TokenBatch, cov: Tensor, low: float, high: float, eps_low: float, eps_high: float
) -> Tensor:
    """Tokens that may be dropped `[..., N]`: cov between the bounds, and the clip does not bind."""
    d, A = log_ratio(b).detach(), on_mask(b, b.advantage)
    _, free, _ = clipped(d, A, 1 - eps_low, 1 + eps_high)
    return b.mask & (free | (A == 0)) & (cov > low) & (cov < high)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    rate: Share = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"mean_A", "mean_logp", "draw": the largest `uniform` that is dropped, -1 if none}, each `[...]`."""
    batches = list(batches)
    numbers = means(batches, reduce)
    n, shards = numbers.pop("tokens"), []
    for b in batches:
        uniform = b.need("uniform", "clip_cov").to(b.dtype)
        cov = covariance(b, **numbers)
        shards.append((uniform, candidates(b, cov, low, high, eps_low, eps_high)))
    some = summed((mask.sum(-1) for _, mask in shards), reduce)
    draw = order_statistic(shards, chosen_count(rate, n).minimum(some), reduce)
    return numbers | {"draw": torch.where(some > 0, draw, -1)}


def surrogate(
    b: TokenBatch,
    *,
    mean_A: Tensor,
    mean_logp: Tensor,
    draw: Tensor,
    low: float = 1.0,
    high: float = 5.0,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Clip-Cov given the numbers of `whole_batch`. Needs `uniform`; both bounds are exclusive."""
    cov = covariance(b, mean_A, mean_logp)
    dropped = candidates(b, cov, low, high, eps_low, eps_high)
    uniform = b.need("uniform", "clip_cov").to(b.dtype)
    dropped = dropped & (uniform <= draw.to(uniform).unsqueeze(-1))
    d, A = log_ratio(b), on_mask(b, b.advantage)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, (~dropped).to(d.dtype))
    return Surrogate(S, active, shares | {"dropped": Diagnostic(dropped, "mean")})
