"""MiniRL: S = M sg[min(r, cap)] A log pi, r = pi/mu, M = PPO's mask on u = pi/pi_old.

Source: "Stabilizing RL with LLMs: formulation and practices" (2512.01374); constants from memory.

M = 0 iff (A > 0 and u > 1 + eps_high) or (A < 0 and u < 1 - eps_low). pi_old is `logp_prox`. The
weight corrects staleness and engine together, the mask watches staleness alone.

Gradient weight on grad log pi: M min(r, cap) A.
"""

from __future__ import annotations

import torch

from simlab.core.tokens import (
    Diagnostic,
    Surrogate,
    TokenBatch,
    log_ratio,
    on_mask,
    ratio,
    weighted,
)
from simlab.stabilizers.parts import Above0, RadiusHigh, RadiusLow


def surrogate(
    b: TokenBatch, *, eps_low: RadiusLow = 0.2, eps_high: RadiusHigh = 0.27, cap: Above0 = 5.0
) -> Surrogate:
    """Needs `logp_prox`."""
    prox = b.need("logp_prox", "minirl").detach()
    A, r = on_mask(b, b.advantage), ratio(log_ratio(b).detach())
    u = ratio(log_ratio(b, den=prox).detach())
    up, down = (A > 0) & (u > 1 + eps_high), (A < 0) & (u < 1 - eps_low)
    W = torch.where(up | down, 0.0, r.clamp(max=cap))
    shares = {"clip_high": up, "clip_low": down, "capped": r > cap}
    shown = {name: Diagnostic(x, "mean") for name, x in shares.items()}
    return weighted(b, W * A, shown)
