"""M2PO: S = min(r A, clip(r, min(e^-tau, 1 - low), max(e^tau, 1 + high)) A), r = pi/mu.

Source: "Prosperity before collapse" (2510.01161), official code.

Harmful tokens move out: (A > 0, r > 1) or (A < 0, r < 1). tau is the largest |log r| among them such
that their mean of min(d^2, tau^2) keeps the budget (0.04); nothing is clipped when mean d^2 does. The
smallest radii `low` and `high` override, so the moment left may exceed the budget. The token that
supplies tau stays open. tau belongs to the whole batch; some frameworks take it per micro-batch.

`cut="remove"` takes the largest |log r| away until the mean of d^2 over the harmful tokens that are
left keeps the budget. What is taken away has S = 0 and stays in the denominator. Fewer tokens go: of
d = 0.9, 0.3, 0.1, 0.1 it removes 0.9, where the clip at the moment also cuts 0.3.

Gradient weight on grad log pi: r A, 0 where the clip binds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.quantile import Reduce, moment_bound
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import RadiusHigh, RadiusLow, clipped

Cut = Literal["clip", "remove"]


def harmful(b: TokenBatch) -> tuple[Tensor, Tensor]:
    """d and the tokens whose update moves pi further from mu `[..., N]`."""
    d = log_ratio(b).detach()
    return d, b.mask & (on_mask(b, b.advantage) * d > 0)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    budget: Annotated[float, Interval("(0, inf)")] = 0.04,
    cut: Cut = "clip",
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"tau": `[...]`} in nats, inf where nothing needs clipping."""
    return {"tau": moment_bound([harmful(b) for b in batches], budget, reduce, cut == "remove")}


def surrogate(
    b: TokenBatch,
    *,
    tau: Tensor | float,
    low: RadiusLow = 0.3,
    high: RadiusHigh = 0.5,
    cut: Cut = "clip",
) -> Surrogate:
    """M2PO given tau `[...]`."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    tau = torch.as_tensor(tau, dtype=d.dtype, device=d.device).unsqueeze(-1)
    # a hair wider than e^tau: the token that supplies tau is not cut by rounding
    bound = tau * (1 + 4 * torch.finfo(d.dtype).eps)
    limits = (-bound).exp().clamp(max=1 - low), bound.exp().clamp(min=1 + high)
    S, active, shares = clipped(d, A, *limits)
    if cut == "remove":
        S = torch.where(active, S, 0.0)
    return Surrogate(S, active, shares | {"tau": Diagnostic(tau, "max")})
