"""DIS: S = sg[f(r)] A log pi, f(r) = r if 1 - eps_low < r < 1 + eps_high else 0, r = pi/mu.

Source: direct double-sided importance sampling of SAO (2607.07508) eqs. 1-5; GLM-5 (2602.15763).

No recomputed policy: the total ratio is the weight inside a wide band, and a token outside of it is
rejected, but stays in the denominator (SkyRL drops it). Both ends are excluded, as in the paper; verl and
prime-rl include them. Published bands: 0.7 to 6 (mathematics, the default), 0.2 to 4 (coding). slime clamps to
[0.7, 6] instead, which keeps the tokens outside. SAO's critic and its one rollout a prompt are not part of this.

Gradient weight on grad log pi: f(r) A.
"""

from __future__ import annotations

from simlab.core.tokens import Surrogate, TokenBatch, on_mask, weighted
from simlab.stabilizers.algebra.corrections import Correction, band
from simlab.stabilizers.parts import RadiusHigh, RadiusLow


def correction(
    b: TokenBatch, *, eps_low: RadiusLow = 0.3, eps_high: RadiusHigh = 5.0
) -> Correction:
    """W = r = pi/mu if it is above 1 - {eps_low} and below 1 + {eps_high}, else 0"""
    return band(b, low=1 - eps_low, high=1 + eps_high, strict=True)


def surrogate(b: TokenBatch, *, eps_low: RadiusLow = 0.3, eps_high: RadiusHigh = 5.0) -> Surrogate:
    """The band on pi/mu, its ends excluded."""
    c = correction(b, eps_low=eps_low, eps_high=eps_high)
    return weighted(b, c.W * on_mask(b, b.advantage), c.diagnostics)
