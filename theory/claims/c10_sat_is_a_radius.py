"""Claim 10. SAT's gradient is PPO's with two radii that one number q of the batch sets.

A token on the outward side (A > 0, d > 0; mirrored below) loses its gradient under SAT iff
    u = |d| > min( log(1 + eps), max(q, u*) ),   u* the root of e^u - 1 = eps / (1 + (u/q)^2)
(for d < 0: 1 - e^-u on the left, and -log(1 - eps) for log(1 + eps)); for q = 0 the limit is PPO's.
Proof: above q the cap is 1 + eps c(u); e^u - 1 rises and eps c(u) falls with u, so they cross once, at
u*, and beyond it the token is cut. At or below q the gate is closed and PPO's own limit decides. As
c < 1, u* < log(1 + eps); for q >= log(1 + eps) PPO's limit decides alone.

So, as far as gradients go, SAT at a step with q > 0 is PPO with the radii
    eps'_high = min(eps_high, exp(max(q, u*_+)) - 1),   eps'_low = min(eps_low, 1 - exp(-max(q, u*_-))).
What this does not say: the surrogate's value differs; q moves from batch to batch, so no fixed eps
gives the same run; and only the tail beyond q can be cut beyond PPO, at most 1 - alpha of the tokens.
Once q >= max(log(1 + eps_high), -log(1 - eps_low)), SAT's gradient is PPO's.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from theory.claims.c09_sat_geometry import contraction
from theory.claims.c09_sat_geometry import decode as batch
from theory.claims.c09_sat_geometry import size as numbers
from theory.search import Side

NUMBER, TITLE = 10, "SAT is PPO with radii set by q"
STATEMENT = "cut iff outward and |d| > min(log(1+eps), max(q, u*)) above, mirrored below"
SHAPES = [{"n": n, "scale": s} for n in (20, 60) for s in (0.003, 0.03, 0.3)]
size, decode = numbers, batch


def crossing(q: float, eps: float, up: bool = True) -> float:
    """u* in nats; 0 if q is 0."""
    if q <= 0:
        return 0.0

    def gap(u: float) -> float:
        return (np.expm1(u) if up else -np.expm1(-u)) - eps / (1 + (u / q) ** 2)

    return float(brentq(gap, 0.0, 10.0, xtol=1e-15))


def limit(q: float, eps: float, up: bool = True) -> float:
    """The largest |d| of an outward token that keeps its gradient."""
    own = np.log1p(eps) if up else -np.log1p(-eps)
    return float(min(own, max(q, crossing(q, eps, up)))) if q > 0 else float(own)


def equivalent_radius(q: float, eps: float) -> float:
    """eps' of the upper side: PPO with it cuts the same tokens as SAT at this q."""
    return float(np.expm1(limit(q, eps)))


def cut(d: np.ndarray, A: np.ndarray, low, high) -> np.ndarray:
    """Tokens whose gradient PPO's clip removes at these limits of r."""
    r = np.exp(d)
    return ((A > 0) & (r > high)) | ((A < 0) & (r < low))


def sides(instance: dict) -> list[Side]:
    """Tokens on which the rule and SAT's own clip disagree, and the share cut beyond PPO."""
    d, A = np.asarray(instance["d"]), np.asarray(instance["A"])
    el, eh = instance["el"], instance["eh"]
    lower, upper, q = contraction(d)
    sat = cut(d, A, 1 - el * lower, 1 + eh * upper)
    up, down = limit(q, eh, True), limit(q, el, False)
    rule = ((A > 0) & (d > up)) | ((A < 0) & (d < -down))
    stars = crossing(q, eh, True), crossing(q, el, False), np.log1p(eh), -np.log1p(-el)
    near = np.min([np.abs(np.abs(d) - x) for x in stars], axis=0) < 1e-12  # rounding at a root
    beyond = sat & ~cut(d, A, 1 - el, 1 + eh)
    return [
        Side("rule = SAT, token by token", float((sat != rule)[~near].sum()), 0.0, True),
        Side("share cut beyond PPO <= 1 - alpha", float(beyond.mean()), 0.1),
    ]


def tight():
    """Twenty tokens, two far out and outward: both are cut by SAT and kept by PPO."""
    d = np.append(np.arange(1, 19) / 1000, [0.1, 0.15])
    batch = {"d": d, "A": np.ones(20), "el": 0.2, "eh": 0.2}
    return batch, "share cut beyond PPO <= 1 - alpha", 1.0
