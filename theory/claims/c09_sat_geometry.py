"""Claim 9. Proposition 4.1 of SAT and its one-step corollary.

For one token with ratio r, advantage A, and contraction c in (0, 1] on the side of sign(log r):
 (i)   I_SAT is inside I_PPO, one end strictly when the gate is open, the other end unchanged;
 (ii)  S_SAT(r, A) <= S_PPO(r, A): on A > 0 it is A min(r, .) with a smaller cap, on A < 0
       A max(r, .) with a larger floor;
 (iii) away from kinks the derivatives in r differ exactly on {A > 0, 1 + eh c_+ < r < 1 + eh} and
       {A < 0, 1 - el < r < 1 - el c_-}, where SAT's is 0 and PPO's is A;
 one step r_+ = r + eta dS/dr then has |r_+ - 1| smaller under SAT on these bands, else equal.
Proof: an open gate has u > q, hence 0 < c < 1/2 (i); (ii) as said; (iii) by (ii) each S is A r up to its
limit and constant beyond, so the two differ in slope between the two limits and nowhere else.
The derivatives are checked by central differences of S itself.
"""

from __future__ import annotations

import numpy as np

from theory.search import Side

NUMBER, TITLE = 9, "SAT's update geometry"
STATEMENT = "containment, pointwise pessimism, exact locus of change, smaller outward steps"
SHAPES = [{"n": n, "scale": s} for n in (10, 40) for s in (0.01, 0.1, 0.5)]
ETA, STEP = 1e-4, 1e-6


def size(shape: dict) -> int:
    """Log-ratios and advantages, one radius each."""
    return 2 * shape["n"] + 2


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"d", "A", "el", "eh"}: a batch with heavy tails (x cubed)."""
    n = shape["n"]
    radii = 0.02 + 0.4 / (1 + np.exp(-x[2 * n :]))
    d = shape["scale"] * (x[:n] + x[:n] ** 3 / 3)
    return {"d": np.clip(d, -3, 3), "A": x[n : 2 * n], "el": float(radii[0]), "eh": float(radii[1])}


def contraction(d: np.ndarray, alpha: float = 0.9) -> tuple[np.ndarray, np.ndarray, float]:
    """(c_-, c_+, q) of SAT (14)-(16)."""
    u = np.abs(d)
    q = np.quantile(u, alpha, method="inverted_cdf")
    open_ = (q > 0) & (u > q)
    c = np.where(open_, 1 / (1 + (u / max(q, 1e-300)) ** 2), 1.0)
    return np.where(d < 0, c, 1.0), np.where(d > 0, c, 1.0), float(q)


def surrogate(r, A, low, high):
    """min(r A, clip(r, low, high) A)."""
    return np.minimum(r * A, np.clip(r, low, high) * A)


def slope(r, A, low, high):
    """Central difference of S in r."""
    ahead, behind = surrogate(r + STEP, A, low, high), surrogate(r - STEP, A, low, high)
    return (ahead - behind) / (2 * STEP)


def sides(instance: dict) -> list[Side]:
    """Numbers of breaches, all of which must be 0, and the largest gate rate and factor."""
    d, A = np.asarray(instance["d"]), np.asarray(instance["A"])
    el, eh, r = instance["el"], instance["eh"], np.exp(d)
    lower, upper, q = contraction(d)
    own, base = (1 - el * lower, 1 + eh * upper), (1 - el, 1 + eh)
    gate = (q > 0) & (np.abs(d) > q)
    up, down = (own[1] < base[1]) != (gate & (d > 0)), (own[0] > base[0]) != (gate & (d < 0))
    outside = (own[1] > base[1]) | (own[0] < base[0])
    pessimism = np.maximum(surrogate(r, A, *own) - surrogate(r, A, *base), 0)
    limits = np.stack(np.broadcast_arrays(*own, *base))
    smooth = (np.abs(r - limits) > 2 * STEP).all(0) & (np.abs(A) > 1e-6)
    band = ((A > 0) & (r > own[1]) & (r < base[1])) | ((A < 0) & (r < own[0]) & (r > base[0]))
    g, g_ppo = slope(r, A, *own), slope(r, A, *base)
    differ = np.abs(g - g_ppo) > np.abs(A) / 2
    values = np.where(band, np.abs(g) + np.abs(g_ppo - A), np.abs(g - g_ppo))
    step, step_ppo = np.abs(r + ETA * g - 1), np.abs(r + ETA * g_ppo - 1)
    less = step < step_ppo - ETA * np.abs(A) / 2
    return [
        Side("(i) only the gated end moves, inward", float((up | down | outside).sum()), 0.0, True),
        Side("(ii) S_SAT <= S_PPO", float(pessimism.sum()), 0.0, True),
        Side(
            "(iii) slopes differ on the bands only",
            float((differ != band)[smooth].sum()),
            0.0,
            True,
        ),
        Side(
            "(iii) slopes are 0 and A there",
            float((values > 1e-3 * np.abs(A))[smooth].sum()),
            0.0,
            True,
        ),
        Side("one step: smaller iff on a band", float((less != band)[smooth].sum()), 0.0, True),
        Side("gate rate <= 1 - alpha", float(gate.mean()), 0.1),
        Side("an open gate has c < 1/2", float(np.where(gate, lower * upper, 0).max()), 0.5),
    ]


def tight():
    """Ten distinct gaps: exactly one token is gated."""
    d = np.arange(1, 11) / 100
    return {"d": d, "A": np.ones(10), "el": 0.2, "eh": 0.2}, "gate rate <= 1 - alpha", 1.0
