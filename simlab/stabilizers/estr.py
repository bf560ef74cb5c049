"""ESTR: S = 1[d^2 / (H + eps) <= tau] min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/mu.

Source: entropy-scaled trust regions (2607.22186), from notes; eps .01 from one of them.

H is the entropy of mu at the token's state (`entropy_mu`): noise of equal size in the logits moves an
uncertain token further. For iid logit noise E d^2 is proportional to the Gini index 1 - sum mu^2, not
to H; `scale="gini"` is that exact form and needs `gini_mu`.

tau has no published value. Unless given, it is the (1 - rate)-quantile of the score over the active
tokens of the whole batch, which masks a share `rate` of them.

Gradient weight on grad log pi: r A inside, 0 outside the region or where the clip binds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.quantile import Reduce, abs_quantile
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask

FIELD = {"entropy": "entropy_mu", "gini": "gini_mu"}


def score(b: TokenBatch, scale: str, eps: float) -> Tensor:
    """d^2 / (H + eps) `[..., N]`, 0 where masked."""
    if scale not in FIELD:
        raise ValueError(f"estr: scale must be entropy or gini, got {scale!r}")
    if not eps > 0:
        raise ValueError(f"estr: eps must be above 0, got {eps}")
    return log_ratio(b).detach() ** 2 / (on_mask(b, b.need(FIELD[scale], "estr")) + eps)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    tau: float | None = None,
    rate: float = 0.02,
    scale: str = "entropy",
    eps: float = 0.01,
    reduce: Reduce | None = None,
) -> dict[str, Tensor | float]:
    """{"limit": tau}, or the quantile `[...]` that masks a share `rate`."""
    if not 0 <= rate < 1:
        raise ValueError(f"estr: rate must lie in [0, 1), got {rate}")
    if tau is not None and not tau >= 0:
        raise ValueError(f"estr: tau must be at least 0, got {tau}")
    if tau is not None:
        return {"limit": tau}
    shards = [(score(b, scale, eps), b.mask) for b in batches]
    return {"limit": abs_quantile(shards, round(1 - rate, 12), reduce)}


def surrogate(
    b: TokenBatch,
    *,
    limit: Tensor | float,
    scale: str = "entropy",
    eps: float = 0.01,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """ESTR given the limit `[...]`, inclusive. Raises ValueError for impossible values."""
    check_radii("estr", eps_low, eps_high)
    d = log_ratio(b)
    limit = torch.as_tensor(limit, dtype=d.dtype, device=d.device).unsqueeze(-1)
    inside = score(b, scale, eps) <= limit
    A = on_mask(b, b.advantage)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, inside.to(d.dtype))
    shown = {"out_of_band": Diagnostic(~inside, "mean"), "limit": Diagnostic(limit, "max")}
    return Surrogate(S, active, shares | shown)
