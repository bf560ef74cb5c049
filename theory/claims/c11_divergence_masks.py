"""Claim 11. What coarse divergences see: DPPO's orderings, Pinsker, and the bands of KPop and IcePop.

For events coarsened to {a} against the rest (Binary), or to TopK(mu) + {a} + rest (TopK):
    Binary-TV <= TopK-TV <= TV,   Binary-KL <= TopK-KL <= KL(mu || pi),   2 TV^2 <= KL(mu || pi)
(data processing: merging events never increases an f-divergence; the binary TV |p - m| needs no
1/2). KPop accepts p iff both Bernoulli KLs to m are at most phi: each is 0 at p = m and increases
away from it, so the accepted set is an interval around m; in ratios, [.574, 1.43] at phi = .1 and
m = 1/2, but [1.7e-5, 8.05] at m = .01: nearly one-sided. IcePop's band is [low m, high m].
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from theory.search import Side
from theory.tables import softmax, tv

NUMBER, TITLE = 11, "Divergence masks"
STATEMENT = "Binary <= TopK <= full for TV and KL; Pinsker; KPop accepts an interval around mu(a)"
SHAPES = [
    {"V": V, "K": K, "phi": phi} for V, K in ((3, 1), (6, 2), (10, 4)) for phi in (0.001, 0.1)
]


def size(shape: dict) -> int:
    """Logits of mu and their change."""
    return 2 * shape["V"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"mu", "p", "K", "phi"}; the sampled action is the last one."""
    V = shape["V"]
    both = {"mu": softmax(x[:V]), "p": softmax(x[:V] + x[V:])}
    return both | {"K": shape["K"], "phi": shape["phi"]}


def kl(m: np.ndarray, p: np.ndarray) -> float:
    """KL(m || p) in nats, p > 0."""
    on = m > 0
    return float((m[on] * np.log(m[on] / p[on])).sum())


def merged(x: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Kept events, then everything else as one."""
    return np.append(x[keep], x[~keep].sum())


def bernoulli_kl(p: float, q: float) -> float:
    """D_B(p || q) in nats for probabilities inside (0, 1)."""
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def kpop_band(m: float, phi: float) -> tuple[float, float]:
    """The interval of p that KPop accepts at mu(a) = m, within [1e-12, 1 - 1e-12]."""

    def excess(p: float) -> float:
        return max(bernoulli_kl(p, m), bernoulli_kl(m, p)) - phi

    tiny = 1e-12
    low = brentq(excess, tiny, m, xtol=1e-16) if excess(tiny) > 0 else tiny
    high = brentq(excess, m, 1 - tiny, xtol=1e-16) if excess(1 - tiny) > 0 else 1 - tiny
    return low, high


def sides(instance: dict) -> list[Side]:
    """Both chains, Pinsker, and KPop's test against its interval."""
    mu, p = np.asarray(instance["mu"]), np.asarray(instance["p"])
    a, phi = len(mu) - 1, instance["phi"]
    binary = np.arange(len(mu)) == a
    top = binary.copy()
    top[np.argsort(-mu, kind="stable")[: instance["K"]]] = True
    levels = [(merged(mu, keep), merged(p, keep)) for keep in (binary, top)] + [(mu, p)]
    tvs, kls = [float(tv(*x)) for x in levels], [kl(*x) for x in levels]
    m, q = float(np.clip(mu[a], 1e-9, 1 - 1e-9)), float(np.clip(p[a], 1e-9, 1 - 1e-9))
    low, high = kpop_band(m, phi)
    accepted = max(bernoulli_kl(q, m), bernoulli_kl(m, q)) <= phi
    near = min(abs(q / low - 1), abs(q / high - 1)) < 1e-9
    return [
        Side("Binary-TV = |pi - mu|", tvs[0], abs(p[a] - mu[a]), True),
        Side("Binary-TV <= TopK-TV", tvs[0], tvs[1]),
        Side("TopK-TV <= TV", tvs[1], tvs[2]),
        Side("Binary-KL <= TopK-KL", kls[0], kls[1]),
        Side("TopK-KL <= KL", kls[1], kls[2]),
        Side("2 TV^2 <= KL", 2 * tvs[2] ** 2, kls[2]),
        Side("KPop = its interval", float(near or accepted == (low <= q <= high)), 1.0, True),
    ]


def tight():
    """Three tokens, K = 1: the top token, the sampled one and the rest are everything."""
    mu, p = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.3, 0.2])
    return {"mu": mu, "p": p, "K": 1, "phi": 0.1}, "TopK-TV <= TV", 1.0
