"""CISPO: S = sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi, r = pi/mu.

Source: MiniMax-M1 (2506.13585); TRL's argument is the cap 1 + eps_high itself (5 is recommended).

The lower end is switched off by eps_low = 1, as published; verl clips both (0.2/0.2) by default.

Gradient weight on grad log pi: clip(r) A. The weight is capped, and every token keeps a gradient.
"""

from __future__ import annotations

from simlab.core.tokens import (
    Diagnostic,
    Surrogate,
    TokenBatch,
    log_ratio,
    on_mask,
    ratio,
    weighted,
)
from simlab.stabilizers.parts import RadiusHigh, RadiusLow


def surrogate(b: TokenBatch, *, eps_low: RadiusLow = 1.0, eps_high: RadiusHigh = 0.2) -> Surrogate:
    """A cap on the weight, and on its lower end 1 - eps_low."""
    r, A = ratio(log_ratio(b).detach()), on_mask(b, b.advantage)
    W = r.clamp(1 - eps_low, 1 + eps_high)
    shown = {"capped": Diagnostic(lambda: r > 1 + eps_high, "mean")}
    return weighted(b, W * A, shown)
