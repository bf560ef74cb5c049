"""Importance-weighted policy gradient: S = r A, r = pi/mu, nothing clipped.

Source: importance sampling; unbiased for the L' of SAT (3), of unbounded variance.

Gradient weight on grad log pi: r A.
"""

from __future__ import annotations

from math import inf

from simlab.stabilizers.ppo import clipped
from simlab.tokens import Surrogate, TokenBatch, log_ratio, on_mask


def surrogate(b: TokenBatch) -> Surrogate:
    """Token-level importance weight against the rollout policy; no hyper-parameters."""
    S, active, diagnostics = clipped(log_ratio(b), on_mask(b, b.advantage), 0, inf)
    return Surrogate(S, active, {"overflow": diagnostics["overflow"]})
