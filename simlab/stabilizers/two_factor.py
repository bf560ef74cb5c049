"""Two-factor correction: S = W(k) min(u A, clip(u, 1 - eps_low, 1 + eps_high) A), u = pi/pi_old, k = pi_old/mu.

Source: "Missing old logits" (2605.12070), from notes; its band constant c is not known to us.

The total ratio pi/mu = u k holds two things: k, what the engine does to the trainer's own policy of the
rollout (repaired by a symmetric band [1/c, c]), and u, how far training has moved since (clipped
on the side of the advantage). pi_old is `logp_prox`, the TRAINER at the rollout's version; any other
proximal policy mixes the two factors again. `repair` mask: W = k inside and 0 outside, clamp:
W = clip(k, 1/c, c).

`untouched` reports the share that neither factor touches; the paper's EWMA of the weights is reset
where it falls below 0.9 (core/state.py).

Gradient weight on grad log pi: W u A, 0 where the clip binds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from simlab.core.arguments import Interval
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.statistics import log_of
from simlab.stabilizers.parts import RadiusHigh, RadiusLow, clipped, in_band

Band = Annotated[float, Interval("[1, inf)")]
Repair = Literal["mask", "clamp"]


def correction(b: TokenBatch, *, c: Band = 5.0, repair: Repair = "mask") -> Correction:
    """W = k = prox/mu with repair {repair} outside of 1/{c} to {c}"""
    d = log_of(b, "k", "two_factor")
    k, inside = ratio(d), in_band(d.abs(), 1, c)
    outside = {"out_of_band": Diagnostic(~inside, "mean")}
    if repair == "mask":
        return Correction("k", k, inside, outside)
    return Correction("k", k.clamp(1 / c, c), None, outside)


def surrogate(
    b: TokenBatch,
    *,
    c: Band = 5.0,
    repair: Repair = "mask",
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Needs `logp_prox`."""
    engine = correction(b, c=c, repair=repair)
    u, A = log_ratio(b, den=b.need("logp_prox", "two_factor")), on_mask(b, b.advantage)
    S, active, shares = clipped(u, A, 1 - eps_low, 1 + eps_high, engine.W)
    outside = engine.diagnostics["out_of_band"].value
    clips = shares["clip_high"].value | shares["clip_low"].value
    untouched = {"untouched": Diagnostic(~outside & ~clips, "mean")}
    return Surrogate(S, active, shares | engine.diagnostics | untouched)
