"""Claim 8. A bound on the sampled action's ratio says next to nothing about the rest.

Let m = mu(a) and |r(a) - 1| <= eps for the one sampled action a, three tokens or more. Then
    D_TV <= 1 - m (1 - eps),
and every smaller value occurs for some mu and pi. Proof: 1 - D_TV = sum min(mu, pi) >= min(m, pi(a))
>= m (1 - eps). Put mu's other mass on one token, pi's on another, and r(a) = 1 - eps: attained (there pi
is not << mu; with a little of mu everywhere it is approached). Along the segment from mu to that pi,
r(a) stays in the band and D_TV takes every value in between. For a given mu the largest is
1 - m (1 - eps) - the smallest other probability.
A clip at 0.2 on a token of probability 0.01 is compatible with a TV of 0.992: PPO's clip removes a
gradient, it does not bound the distribution.
"""

from __future__ import annotations

import numpy as np

from theory.search import Side
from theory.tables import softmax, tv

NUMBER, TITLE = 8, "What a sampled ratio hides"
STATEMENT = (
    r"$|r(a) - 1| \le \epsilon$ at one action allows any $D_{TV}$ up to $1 - \mu(a)(1 - \epsilon)$"
)
SHAPES = [{"V": V, "eps": eps} for V in (3, 6) for eps in (0.0, 0.05, 0.2)]


def size(shape: dict) -> int:
    """Logits of mu, logits of pi on the rest, and where r(a) lies in its band."""
    return 2 * shape["V"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"mu", "p", "eps"}: action 0 is the sampled one and stays in the band."""
    V, eps = shape["V"], shape["eps"]
    mu = softmax(x[:V])
    top = min(mu[0] * (1 + eps * np.tanh(x[V])), 1.0)
    rest = softmax(x[V + 1 :]) * (1 - top)
    return {"mu": mu, "p": np.concatenate([[top], rest]), "eps": eps}


def sides(instance: dict) -> list[Side]:
    """TV against what the sampled action alone can promise."""
    mu, p, eps = np.asarray(instance["mu"]), np.asarray(instance["p"]), instance["eps"]
    return [Side("TV <= 1 - mu(a)(1-eps)", float(tv(mu, p)), 1 - mu[0] * (1 - eps))]


def tight():
    """mu(a) = 0.01, r(a) = 0.8, the rest moved from one token to another: TV = 0.992."""
    mu, p = np.array([0.01, 0.99, 0.0]), np.array([0.008, 0.0, 0.992])
    return [({"mu": mu, "p": p, "eps": 0.2}, "TV <= 1 - mu(a)(1-eps)", 1.0)]
