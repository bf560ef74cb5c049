"""Claim 7. A ratio envelope over ALL actions bounds the TV: Prop. 3.2, (6), (7), and sharper forms.

    pi << mu, 1 - low(a) <= r(a) <= 1 + high(a) for every a   =>
        D_TV <= (1/2) E_mu max(low, high)                                                    (7)
        D_TV <= min(E_mu low, E_mu high)                                            not in the paper
    with constant radii el, eh:   D_TV <= el eh / (el + eh) <= max(el, eh) / 2

Proof of (7): D_TV = (1/2) E_mu |r - 1|, and |r - 1| <= max(low, high). The second: E_mu (r - 1) = 0, so
D_TV = E_mu max(r - 1, 0) = E_mu max(1 - r, 0). Neither implies the other: equal constant radii favour (7), a
side that is wide open does not hurt the second. Constant radii: on [-el, eh], |x| lies below its chord
el + (x + el)(eh - el)/(eh + el); the mean of the chord at E x = 0 is 2 el eh/(el + eh). Half of it
bounds (1/2) E|r - 1| = D_TV. Half the harmonic mean is at most half the maximum; equal iff el = eh.
Without pi << mu all fail: mu = (1, 0), pi = (0.7, 0.3).
Attained by the two-point law P(r = 1 + eh) = el/(el + eh); at (0.2, 0.28) it is 0.1167, the paper's 0.14.
(7) is attained by low = high = |r - 1|, the second by low = max(1 - r, 0) with any high.
"""

from __future__ import annotations

import numpy as np

from theory.search import Side
from theory.tables import softmax, tv

NUMBER, TITLE = 7, "Ratio envelope"
STATEMENT = r"$\pi \ll \mu$, $1 - \epsilon_l(a) \le r(a) \le 1 + \epsilon_h(a)$ for all $a$ imply $D_{TV} \le \min(\frac{1}{2} E_\mu \max(\epsilon_l, \epsilon_h),\ E_\mu \epsilon_l,\ E_\mu \epsilon_h)$; constant radii give $D_{TV} \le \epsilon_l \epsilon_h / (\epsilon_l + \epsilon_h)$"
SHAPES = [{"V": V} for V in (2, 3, 5, 10)]


def size(shape: dict) -> int:
    """Logits of mu and of pi, slack of the lower and of the upper radius of each action."""
    return 4 * shape["V"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"mu", "p", "low", "high"}, pi near mu; the radii hold, about half of them without slack."""
    V = shape["V"]
    mu, p = softmax(x[:V]), softmax(x[:V] + 0.5 * np.tanh(x[V : 2 * V]))
    slack = np.clip(x[2 * V :], 0, 1).reshape(2, V)
    return {
        "mu": mu,
        "p": p,
        "low": np.maximum(1 - p / mu, 0) + slack[0],
        "high": np.maximum(p / mu - 1, 0) + slack[1],
    }


def sides(instance: dict) -> list[Side]:
    """TV against the radii of each action, and against the smallest constant ones."""
    mu, p, low, high = (np.asarray(instance[name], float) for name in ("mu", "p", "low", "high"))
    if ((mu == 0) & (p > 0)).any():
        raise ValueError("the claim needs pi << mu, and mu misses a token that pi has")
    on = mu > 0
    r = p[on] / mu[on]
    if (r < 1 - low[on] - 1e-12).any() or (r > 1 + high[on] + 1e-12).any() or min(low) < 0:
        raise ValueError("low and high are no envelope of pi/mu, or low is below 0")
    el, eh = max(1 - r.min(), 0.0), max(r.max() - 1, 0.0)
    sharp = el * eh / (el + eh) if el + eh > 0 else 0.0
    distance = float(tv(mu, p))
    return [
        Side("TV <= E max(low, high)/2", distance, float((mu * np.maximum(low, high)).sum() / 2)),
        Side("TV <= min(E low, E high)", distance, float(min((mu * low).sum(), (mu * high).sum()))),
        Side("TV <= el eh/(el+eh)", distance, sharp),
        Side("TV <= max(el, eh)/2", distance, max(el, eh) / 2),
    ]


def tight():
    """The two-point law at (0.2, 0.28); radii that are |r - 1| itself, and open on one side."""
    el, eh = 0.2, 0.28
    mu = np.array([el, eh]) / (el + eh)
    law = {
        "mu": mu,
        "p": mu * np.array([1 + eh, 1 - el]),
        "low": np.full(2, el),
        "high": np.full(2, eh),
    }
    mu, p = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.25, 0.3])
    gap, open_ = p / mu - 1, np.ones(3)
    exact = {"mu": mu, "p": p, "low": np.abs(gap), "high": np.abs(gap)}
    lower = {"mu": mu, "p": p, "low": np.maximum(-gap, 0), "high": open_}
    upper = {"mu": mu, "p": p, "low": open_, "high": np.maximum(gap, 0)}
    return [
        (law, "TV <= el eh/(el+eh)", 1.0),
        (exact, "TV <= E max(low, high)/2", 1.0),
        (lower, "TV <= min(E low, E high)", 1.0),
        (upper, "TV <= min(E low, E high)", 1.0),
    ]
