"""SeqClip: S = 1[low <= rho <= high] min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), rho as GSPO.

Source: SAT (39); band [0.995, 1.005] from its page. No run of it is published.

A response whose mean log-ratio leaves the band is dropped whole, on either side.

Gradient weight on token t: (1/T) sum over the response of rho A', 0 outside the band.
"""

from __future__ import annotations

from torch import Tensor

from simlab.core.per_response import response_means
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.statistics import log_of, reduced
from simlab.stabilizers.parts import (
    BandHigh,
    BandLow,
    RadiusHigh,
    RadiusLow,
    check_band,
    clipped,
    in_band,
    share_gradient,
)


def correction(b: TokenBatch, *, low: BandLow = 0.995, high: BandHigh = 1.005) -> Correction:
    """rejects a response whose geometric mean of r = pi/mu is not from {low} to {high}"""
    check_band("seqclip", low, high)
    inside = in_band(reduced(b, log_of(b, "r", "seqclip"), "mean"), low, high)
    return Correction("r", None, inside, {"out_of_band": Diagnostic(~inside, "mean")})


def surrogate(
    b: TokenBatch,
    *,
    low: BandLow = 0.995,
    high: BandHigh = 1.005,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    W: Tensor | None = None,
) -> Surrogate:
    """Both ends of the band are inclusive. W `[..., N]` multiplies S. Raises ValueError for low above high."""
    A, d = on_mask(b, b.advantage), response_means(b, log_ratio(b))
    c = correction(b, low=low, high=high)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, c.W if W is None else c.W * W)
    return Surrogate(S, share_gradient(b, active, S), shares | c.diagnostics)
