"""IPO: S = M w log pi - kl_tau d^2, w = A min(r, cap) a constant, M = 1[|pi - mu| <= eps], r = pi/mu, d = log r.

Source: INTELLECT policy optimization, prime-rl's default loss since March 2026 (#1930); not Identity PO.

A trust region in probability mass, on both sides and whatever the sign of A; nothing but the cap bounds the
ratio: mu = 1e-6 and pi = 0.2 is kept with weight 1e4 A. Defaults are those of September 2026 (#3586: eps 0.3,
no KL). Before that eps was 0.1 and 0.2, and kl_tau 1e-3; Kimi K2.5 has that term too (2602.02276). It is over
all tokens, rejected ones too, which stay in the denominator.

Gradient weight on grad log pi: M min(r, cap) A - 2 kl_tau d.
"""

from __future__ import annotations

import torch

from simlab.core.tokens import Surrogate, TokenBatch, graded, log_ratio, on_mask
from simlab.stabilizers.algebra.corrections import Correction, keep
from simlab.stabilizers.algebra.corrections import cap as capped
from simlab.stabilizers.parts import Above0, AtLeast0


def correction(b: TokenBatch, *, eps: AtLeast0 = 0.3) -> Correction:
    """rejects a token whose |pi - mu| is above {eps}"""
    return keep(b, gate="tv", max=eps)


def surrogate(
    b: TokenBatch, *, eps: AtLeast0 = 0.3, cap: Above0 = 1e4, kl_tau: AtLeast0 = 0.0
) -> Surrogate:
    """eps in units of probability, kl_tau for each nat^2."""
    inside, r = correction(b, eps=eps), capped(b, max=cap)
    A, logp, d = on_mask(b, b.advantage), on_mask(b, b.logp), log_ratio(b)
    with torch.no_grad():
        W = torch.where(inside.W > 0, r.W, 0.0) * A
        S, w = W * logp, W
        if kl_tau:
            S, w = S - kl_tau * d**2, w - 2 * kl_tau * d
    return Surrogate(graded(logp, S, w), w != 0, inside.diagnostics | r.diagnostics)
