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
At sequence level d is the mean log-ratio of the response and PPO is GSPO. The gradient is the registry's.
Once q >= max(log(1 + eps_high), -log(1 - eps_low)), SAT's gradient is PPO's.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
from scipy.optimize import brentq

from simlab.stabilizers import sat
from simlab.verify.claims.c09_sat_geometry import ALPHA, decode, ladder, none, run, size
from theory.search import Side

__all__ = ["SHAPES", "decode", "size"]
NUMBER, TITLE = 10, "SAT is PPO with radii set by q"
STATEMENT = (
    r"cut iff outward and $|d| > \min(\log(1 + \epsilon), \max(q, u^*))$ above, mirrored below"
)
SHAPES = [{"n": n, "scale": s, "per": n // 20} for n in (20, 60) for s in (0.003, 0.03, 0.3)]


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


def sides(instance: dict, method: ModuleType | SimpleNamespace = sat) -> list[Side]:
    """Tokens on which the rule and the registry's SAT disagree, and the share cut beyond PPO."""
    x = run(instance, method)
    up, down = limit(x.q_own, x.eh, True), limit(x.q_own, x.el, False)
    rule = ((x.A > 0) & (x.d > up)) | ((x.A < 0) & (x.d < -down))
    stars = up, down, np.log1p(x.eh), -np.log1p(-x.el)
    near = (
        np.min([np.abs(np.abs(x.d) - star) for star in stars], axis=0) < 1e-12
    )  # rounding at a root
    at_q = np.abs(np.abs(x.d) - x.q_own) < 1e-15  # a closed gate, where the limit may be q itself
    plain = (x.A != 0) & (~near | at_q)
    cut = (x.slope == 0) & (x.A != 0)
    beyond = cut & (x.slope_base != 0)
    return [
        none("rule = SAT, token by token", (cut != rule)[plain]),
        Side("share cut beyond PPO <= 1 - alpha", float(beyond.mean()), 1 - ALPHA),
    ]


def tight():
    """Twenty tokens or responses, two far out and outward: both are cut by SAT and kept by PPO.
    The nearer one would be kept if q lay between two tokens."""
    found = []
    for per in (1, 2):
        d = np.repeat(np.append(np.arange(1, 19) / 1000, [0.0385, 0.15]), per)
        found.append((ladder(20, per) | {"d": d}, "share cut beyond PPO <= 1 - alpha", 1.0))
    return found
