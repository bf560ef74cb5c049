"""VESPO: S = sg[phi] A log pi, phi = exp(lam + k log W - lam W), W = the product of r over the response, r = pi/mu.

Source: Variational Sequence-Level Soft Policy Optimization (2602.10693), official code, TRL.

phi(1) = 1 and the peak lies at W = k / lam. k and lam are those of `pos` for A >= 0, of `neg` for A < 0,
by the token's own A; the official code takes the sign of the first token. Its docstring has (2, 1.5) and (4, 2.5),
its defaults and TRL's are the ones here. Each d is held within 20 nats and log W within [log 1e-8, 20].

Gradient weight on grad log pi: phi A.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch

from simlab.core.arguments import Interval
from simlab.core.per_response import response_sums, to_tokens
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, weighted

LOWEST, HIGHEST = math.log(1e-8), 20.0  # nats, of log W
Exponent = Annotated[float, Interval("(0, inf)")]


def surrogate(
    b: TokenBatch,
    *,
    k_pos: Exponent = 2.0,
    lam_pos: Exponent = 3.0,
    k_neg: Exponent = 3.0,
    lam_neg: Exponent = 2.0,
) -> Surrogate:
    """Whole responses only."""
    A, d = on_mask(b, b.advantage), log_ratio(b).detach()
    log_w = to_tokens(b, response_sums(b, d.clamp(-HIGHEST, HIGHEST))).clamp(LOWEST, HIGHEST)
    k, lam = (
        torch.where(A < 0, torch.full_like(d, n), p)
        for p, n in ((k_pos, k_neg), (lam_pos, lam_neg))
    )
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    damped = Diagnostic(lambda: (phi < 0.5) & (A != 0), "mean")
    return weighted(b, phi * A, {"damped": damped})
