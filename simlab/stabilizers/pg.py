"""Importance-weighted policy gradient: S = r A, r = pi/mu, nothing clipped.

Source: importance sampling; unbiased for the L' of SAT (3), of unbounded variance.

Gradient weight on grad log pi: r A.
"""

from __future__ import annotations

from math import inf

from torch import Tensor

from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import clipped


def surrogate(b: TokenBatch, *, W: Tensor | None = None) -> Surrogate:
    """Token-level importance weight against the rollout policy; no hyper-parameters. W `[..., N]` multiplies S."""
    S, active, diagnostics = clipped(log_ratio(b), on_mask(b, b.advantage), 0, inf, W)
    return Surrogate(S, active, {"overflow": diagnostics["overflow"]})
