"""Importance-weighted policy gradient: S = r A, r = pi / mu, nothing clipped.

Gradient weight on grad log pi: r A. Unbiased for the L' of SAT (3) and of unbounded variance.
"""

from __future__ import annotations

from simlab.tokens import D_MAX, Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio


def surrogate(b: TokenBatch) -> Surrogate:
    """Token-level importance weight against the rollout policy; no hyper-parameters."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    overflow = d > D_MAX
    return Surrogate(ratio(d) * A, (A != 0) & ~overflow, {"overflow": Diagnostic(overflow, "mean")})
