"""Claim 10. SAT's gradient is PPO's with one radius per batch.

For a token on the outward side (A > 0, d > 0; mirrored below), SAT cuts the gradient iff
    u = |d| > min( log(1 + eps), max(q, u*) ),   u* the root of e^u - 1 = eps / (1 + (u/q)^2)
(for d < 0: 1 - e^-u on the left, and -log(1 - eps) for log(1 + eps)). Proof: above q the cap is
1 + eps c(u); e^u - 1 rises and eps c(u) falls with u, so they cross once, at u*, and beyond it the
token is cut. At or below q the gate is closed and PPO's own limit decides.

So, as far as gradients go, SAT at a step is PPO with the radius
    eps' = min(eps, exp(max(q, u*)) - 1)
on each side, chosen by one number q of the batch. What this does not say: the surrogate's value
differs; q moves from batch to batch, so no fixed eps gives the same run; and the alpha-tail alone
can be cut, so eps' never cuts more than 1 - alpha of the tokens beyond PPO. As q grows past
log(1 + eps), SAT is PPO.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from theory.claims.c09_sat_geometry import clip, contraction
from theory.claims.c09_sat_geometry import decode as batch
from theory.claims.c09_sat_geometry import size as numbers
from theory.search import Side

NUMBER, TITLE = 10, "SAT is PPO with one radius per batch"
STATEMENT = "cut iff outward and |d| > min(log(1+eps), max(q, u*)); token by token"
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


def sides(instance: dict) -> list[Side]:
    """Tokens on which the rule and SAT's own clip disagree: none (rounding at a limit aside)."""
    d, A = np.asarray(instance["d"]), np.asarray(instance["A"])
    el, eh, r = instance["el"], instance["eh"], np.exp(d)
    lower, upper, q = contraction(d)
    _, g = clip(r, A, 1 - el * lower, 1 + eh * upper)
    up, down = limit(q, eh, True), limit(q, el, False)
    cut = ((A > 0) & (d > up)) | ((A < 0) & (d < -down))
    near = (np.abs(d - up) < 1e-12) | (np.abs(d + down) < 1e-12)
    return [
        Side(
            "rule = SAT, token by token",
            float(((g == 0) != cut)[~near & (A != 0)].sum()),
            0.0,
            True,
        ),
        Side("eps' <= eps", equivalent_radius(q, eh), eh),
    ]


def tight():
    """q above log(1 + eps): SAT is PPO."""
    d = np.full(10, 0.5)
    return {"d": d, "A": np.ones(10), "el": 0.2, "eh": 0.2}, "eps' <= eps", 1.0
