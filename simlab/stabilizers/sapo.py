"""SAPO: S = f(r) A, f(r) = (4 / tau) sigmoid(tau (r - 1)), r = pi/mu.

Source: Soft Adaptive Policy Optimization (2511.20347); verl and TRL.

tau = tau_pos for A > 0 and tau_neg otherwise. f'(1) = 1, and the weight decays on both sides of r = 1:
pull-back is damped as well. Aggregate by seq_mean_token_mean. ms-swift documents f without 4 / tau.

Gradient weight on grad log pi: r A 4 s (1 - s), s = sigmoid(tau (r - 1)).
"""

from __future__ import annotations

import math

import torch

from simlab.tokens import (
    D_MAX,
    Diagnostic,
    Surrogate,
    TokenBatch,
    graded,
    log_ratio,
    on_mask,
    ratio,
)


def surrogate(b: TokenBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Surrogate:
    """Raises ValueError unless both tau are above 0 and finite."""
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not 0 < tau < math.inf:
            raise ValueError(f"sapo: {name} must be above 0 and finite, got {tau}")
    d, A = log_ratio(b), on_mask(b, b.advantage)
    with torch.no_grad():
        r = ratio(d)
        tau = torch.where(A > 0, torch.full_like(d, tau_pos), tau_neg)
        x = tau * (r - 1)
        s, rest = x.sigmoid(), (-x).sigmoid()
        w = torch.where(d > D_MAX, 0.0, r * rest * A * 4 * s)
        S = 4 / tau * s * A
    damped = Diagnostic(lambda: (4 * s * rest < 0.5) & (A != 0), "mean")
    return Surrogate(graded(d, S, w), w != 0, {"damped": damped})
