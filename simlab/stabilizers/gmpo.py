"""GMPO: S = A exp(mean_t l_t), l = d clipped to at most eps_high for A > 0, at least -eps_low for A < 0.

Source: Geometric-Mean Policy Optimization (2507.20673); limits 0.4 in nats, 0.2 in verl's geo_mean.

The geometric mean of the clipped token ratios of a response: one outlier moves it by at most its limit
over T.

Gradient weight on token t: (1/T) sum over the response of A exp(mean l), 0 on a clipped token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.core.per_response import response_means
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import AtLeast0, clipped, share_gradient


def surrogate(
    b: TokenBatch, *, eps_low: AtLeast0 = 0.4, eps_high: AtLeast0 = 0.4, W: Tensor | None = None
) -> Surrogate:
    """Limits on the log-ratio, in nats. W `[..., N]` multiplies S."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    up, down = (A > 0) & (d > eps_high), (A < 0) & (d < -eps_low)
    held = torch.where(up, torch.full_like(d, eps_high), torch.where(down, -eps_low, d))
    S, active, diagnostics = clipped(response_means(b, held), A, 0, torch.inf, W)
    reached = share_gradient(b, active, S)
    shares = {"clip_high": up, "clip_low": down}
    shown = {name: Diagnostic(x, "mean") for name, x in shares.items()}
    shown["overflow"] = diagnostics["overflow"]
    return Surrogate(S, reached & ~up & ~down, shown)
