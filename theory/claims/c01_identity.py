"""Claim 1. The performance-difference identity, (29)-(31).

    J(pi) - J(mu) = L' - Delta,   Delta = E_mu[ R sum_t (r_t - 1) (1 - prod_{j>t} r_j) ]

Assumes pi << mu at every prefix that mu reaches, a fixed horizon T, an undiscounted reward of the
whole answer. Proof: pi(y) - mu(y) telescopes into sum_t [prod_{k<t} mu_k] (pi_t - mu_t)
[prod_{j>t} pi_j] = mu(y) sum_t (r_t - 1) prod_{j>t} r_j. Add and subtract the same sum without the
future product; multiply by R and sum over y. Where mu(y) = 0 both are 0: the first impossible token
of a reachable prefix has pi = 0 too. The term t = T has an empty product, so T = 1 leaves Delta = 0.
Also |J(pi) - J(mu)| <= 2 xi D_TV(answers), attained by R = xi sign(pi(y) - mu(y)).
"""

from __future__ import annotations

import numpy as np

from theory.instances import (
    SHAPES,
    decode,
    rare_prefix_example,
    rare_token_example,
    size,
    two_token_example,
)
from theory.search import Side
from theory.tables import Pair

__all__ = ["SHAPES", "decode", "size"]
NUMBER, TITLE = 1, "Performance-difference identity"
STATEMENT = r"$J(\pi) - J(\mu) = L' - \Delta$; $\Delta = 0$ when $T = 1$"


def sides(instance: dict) -> list[Side]:
    """The identity, and for T = 1 the vanishing remainder; |dJ| <= 2 xi TV of whole answers."""
    p = Pair(**instance)
    p.need_support()
    found = [Side("J(pi) - J(mu) = L' - Delta", p.dJ, p.L - p.Delta, equal=True)]
    found.append(Side("|J(pi) - J(mu)| <= 2 xi TV(answers)", abs(p.dJ), 2 * p.xi * p.tv_answers))
    if p.T == 1:
        found.append(Side("T = 1: L' = J(pi) - J(mu)", p.L, p.dJ, equal=True))
    return found


def tight():
    """R = the sign of pi(y) - mu(y) turns |dJ| <= 2 xi TV into an equality."""
    found = []
    for instance in (two_token_example(), rare_token_example(3), rare_prefix_example(3)):
        p = Pair(**instance)
        own = instance | {"R": np.sign(p.p_pi - p.p_mu)}
        found.append((own, "|J(pi) - J(mu)| <= 2 xi TV(answers)", 1.0))
    return found
