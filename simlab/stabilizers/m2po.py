"""M2PO: S = min(r A, clip(r, min(e^-tau, 1 - low), max(e^tau, 1 + high)) A), r = pi/mu.

Source: "Prosperity before collapse" (2510.01161), official code.

Harmful tokens move out: (A > 0, r > 1) or (A < 0, r < 1). tau is the largest |log r| among them such
that their mean of min(d^2, tau^2) keeps the budget (.04); nothing is clipped when mean d^2 does. The
smallest radii `low` and `high` override, so the moment left may exceed the budget. The token that
supplies tau stays open. tau belongs to the whole batch; some frameworks take it per micro-batch.

Gradient weight on grad log pi: r A, 0 where the clip binds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.quantile import Reduce, moment_bound
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask


def harmful(b: TokenBatch) -> tuple[Tensor, Tensor]:
    """d and the tokens whose update moves pi further from mu `[..., N]`."""
    d = log_ratio(b).detach()
    return d, b.mask & (on_mask(b, b.advantage) * d > 0)


def whole_batch(
    batches: Iterable[TokenBatch], *, budget: float = 0.04, reduce: Reduce | None = None
) -> dict[str, Tensor]:
    """{"tau": `[...]`} in nats, inf where nothing needs clipping."""
    if not budget > 0:
        raise ValueError(f"m2po: budget must be above 0, got {budget}")
    return {"tau": moment_bound([harmful(b) for b in batches], budget, reduce)}


def surrogate(
    b: TokenBatch, *, tau: Tensor | float, low: float = 0.3, high: float = 0.5
) -> Surrogate:
    """M2PO given tau `[...]`. Raises ValueError for impossible radii."""
    check_radii("m2po", low, high)
    d = log_ratio(b)
    tau = torch.as_tensor(tau, dtype=d.dtype, device=d.device).unsqueeze(-1)
    # a hair wider than e^tau: the token that supplies tau is not cut by rounding
    bound = tau * (1 + 4 * torch.finfo(d.dtype).eps)
    S, active, shares = clipped(
        d,
        on_mask(b, b.advantage),
        (-bound).exp().clamp(max=1 - low),
        bound.exp().clamp(min=1 + high),
    )
    return Surrogate(S, active, shares | {"tau": Diagnostic(tau, "max")})
