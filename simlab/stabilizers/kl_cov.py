"""KL-Cov: S = r A - coef |d| on the few tokens of highest covariance, r A on the others, r = pi/mu.

Source: the entropy mechanism of RL (2505.22617), official code in verl (kl_cov).

cov is that of core/covariance.py, as in Clip-Cov, of the whole batch; the max(floor(rate n), 1) of its n active tokens with the largest cov are
held back; where several tie for the last place none of these is. Nothing is clipped. coef is 1 in the official code and
verl's function, 0.1 in verl's configuration.

Gradient weight on grad log pi: r A, less coef sign(d) where held back.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
from torch import Tensor

from simlab.core.covariance import chosen_count, covariance, means
from simlab.core.quantile import Reduce, order_statistic
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, graded, log_ratio, on_mask
from simlab.stabilizers.parts import AtLeast0, Share, clipped


def whole_batch(
    batches: Iterable[TokenBatch], *, rate: Share = 2e-4, reduce: Reduce | None = None
) -> dict[str, Tensor]:
    """{"mean_A", "mean_logp", "top": the largest |cov|, "gap": top less the largest cov that is left
    alone}, each `[...]`."""
    batches = list(batches)
    found = means(batches, reduce)
    n = found.pop("tokens")
    shards = [(covariance(b, **found), b.mask) for b in batches]
    top = order_statistic(shards, n.long(), reduce)
    gaps = [(top.unsqueeze(-1) - cov, mask) for cov, mask in shards]
    after, n = chosen_count(rate, n) + 1, n.long()
    gap = order_statistic(gaps, after.minimum(n), reduce)
    return found | {"top": top, "gap": torch.where(after > n, inf, gap)}


def surrogate(
    b: TokenBatch,
    *,
    mean_A: Tensor,
    mean_logp: Tensor,
    top: Tensor,
    gap: Tensor,
    coef: AtLeast0 = 1.0,
) -> Surrogate:
    """KL-Cov given the numbers of `whole_batch`; coef in reward units a nat."""
    held = b.mask & (top.unsqueeze(-1) - covariance(b, mean_A, mean_logp) < gap.unsqueeze(-1))
    d, A = log_ratio(b), on_mask(b, b.advantage)
    with torch.no_grad():
        plain, _, shares = clipped(d, A, 0, inf)
        S = plain - coef * torch.where(held, d.abs(), 0.0)
        w = torch.where(shares["overflow"].value, 0.0, plain)
        w = w - coef * torch.where(held, d.sign(), 0.0)
    shown = {"overflow": shares["overflow"], "held_back": Diagnostic(held, "mean")}
    return Surrogate(graded(d, S, w), w != 0, shown)
