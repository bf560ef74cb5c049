"""SAPO: S = f(r) A, f(r) = (4 / tau) sigmoid(tau (r - 1)), r = pi/mu.

Source: Soft Adaptive Policy Optimization (2511.20347); verl and TRL.

tau = tau_pos for A > 0 and tau_neg otherwise. f'(1) = 1, and the weight decays on both sides of r = 1:
pull-back is damped as well. Aggregate by seq_mean_token_mean. ms-swift documents f without 4 / tau.

Gradient weight on grad log pi: r A 4 s (1 - s), s = sigmoid(tau (r - 1)).
"""

from __future__ import annotations

from typing import Annotated

import torch

from simlab.core.arguments import Interval
from simlab.core.tokens import (
    LOG_RATIO_CAP,
    Diagnostic,
    Surrogate,
    TokenBatch,
    graded,
    log_ratio,
    on_mask,
    ratio,
)

Temperature = Annotated[float, Interval("(0, inf)")]


def surrogate(
    b: TokenBatch, *, tau_pos: Temperature = 1.0, tau_neg: Temperature = 1.05
) -> Surrogate:
    """A larger tau lets the weight fall off closer to r = 1."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    with torch.no_grad():
        r = ratio(d)
        tau = torch.where(A > 0, torch.full_like(d, tau_pos), tau_neg)
        x = tau * (r - 1)
        s, rest = x.sigmoid(), (-x).sigmoid()
        w = torch.where(d > LOG_RATIO_CAP, 0.0, r * rest * A * 4 * s)
        S = 4 / tau * s * A
    damped = Diagnostic(lambda: (4 * s * rest < 0.5) & (A != 0), "mean")
    return Surrogate(graded(d, S, w), w != 0, {"damped": damped})
