"""CISPO: S = sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi, r = pi/mu.

Source: MiniMax-M1 (2506.13585); TRL's argument is the cap 1 + eps_high itself (5 is recommended).

The lower end is switched off by eps_low = 1, as published; verl clips both (.2/.2) by default.

Gradient weight on grad log pi: clip(r) A. The weight is capped, and every token keeps a gradient.
"""

from __future__ import annotations

from simlab.stabilizers.ppo import check_radii
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio, weighted


def surrogate(b: TokenBatch, *, eps_low: float = 1.0, eps_high: float = 0.2) -> Surrogate:
    """Raises ValueError for impossible radii."""
    check_radii("cispo", eps_low, eps_high)
    r, A = ratio(log_ratio(b).detach()), on_mask(b, b.advantage)
    W = r.clamp(1 - eps_low, 1 + eps_high)
    shown = {"capped": Diagnostic(lambda: r > 1 + eps_high, "mean")}
    return weighted(b, W * A, shown)
