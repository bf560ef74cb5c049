"""IcePop: S = M(k) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/pi_old, k = pi_old/mu.

Source: Ring-1T (2510.18855); Ling-2.6 (2606.15079) eq. (5); SAT (42).

    M(k) = k if low <= k <= high else 0      (weighted, the formula)
    M(k) = 1 if low <= k <= high else 0      (binary, the common simplification)

pi_old is `logp_prox`: the trainer at the rollout's weights in the formula, the trainer just before
the step in frameworks that recompute it.

Frameworks disagree on the ratio that the band tests: pi_old/mu (AReaL, the formula) or pi/mu (rllm).
`band="total"` tests pi/mu; the weight stays pi_old/mu, so that no factor is applied twice.
Band [0.5, 5] here; [0.5, 2] and [0.2, 5] are also in use. k carries no gradient.

Gradient weight on grad log pi: M(k) r A, 0 where the clip (or the dual clip, ppo.py) binds.
"""

from __future__ import annotations

from typing import Literal

from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.statistics import log_of
from simlab.stabilizers.parts import (
    BandHigh,
    BandLow,
    DualClip,
    RadiusHigh,
    RadiusLow,
    check_band,
    clipped,
    in_band,
)

Band = Literal["mismatch", "total"]


def correction(
    b: TokenBatch,
    *,
    low: BandLow = 0.5,
    high: BandHigh = 5.0,
    weighted: bool = True,
    band: Band = "mismatch",
) -> Correction:
    """W = k = prox/mu (or 1: weighted is {weighted}), and 0 unless the {band} ratio is from {low} to {high}"""
    check_band("icepop", low, high)
    k = log_of(b, "k", "icepop")
    inside = in_band(k if band == "mismatch" else log_of(b, "r", "icepop"), low, high)
    outside = {"out_of_band": Diagnostic(~inside, "mean")}
    return Correction("k", ratio(k) if weighted else None, inside, outside)


def surrogate(
    b: TokenBatch,
    *,
    low: BandLow = 0.5,
    high: BandHigh = 5.0,
    weighted: bool = True,
    band: Band = "mismatch",
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    dual_clip: DualClip = None,
) -> Surrogate:
    """Needs `logp_prox`. Both ends of the band are inclusive."""
    c = correction(b, low=low, high=high, weighted=weighted, band=band)
    u, A = log_ratio(b, den=b.need("logp_prox", "icepop")), on_mask(b, b.advantage)
    S, active, shares = clipped(u, A, 1 - eps_low, 1 + eps_high, c.W, dual_clip)
    return Surrogate(S, active, shares | c.diagnostics)
