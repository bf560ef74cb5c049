"""Claim 2. The TV of whole answers is at most the expected sum of one-step TVs, (32).

    D_TV(mu_T || pi_T) <= S = sum_t E_{s_t ~ mu} D_TV(mu(.|s_t) || pi(.|s_t))

No support assumption (the instances here have pi << mu). Proof: the telescoping sum of claim 1 and the triangle inequality; the
trailing product of pi sums to 1 over the later tokens, the leading product of mu is the visitation.
Equality iff for each answer the non-zero terms of the telescoping sum have one sign: later tokens do
not undo earlier ones.
"""

from __future__ import annotations

import numpy as np

from theory.instances import SHAPES, decode, size
from theory.search import Side
from theory.tables import Pair

__all__ = ["SHAPES", "decode", "size"]
NUMBER, TITLE = 2, "Sequence TV"
STATEMENT = "D_TV(mu_T || pi_T) <= sum_t E_mu D_TV[s_t]"


def sides(instance: dict) -> list[Side]:
    """(32)."""
    p = Pair(**instance)
    return [Side("TV(answers) <= S", p.tv_answers, p.S)]


def tight():
    """Two tokens: pi leans to 0, and after 0 leans to 0 again; both sides are .45."""
    mu = [np.full((1, 2), 0.5), np.full((2, 2), 0.5)]
    pi = [np.array([[0.7, 0.3]]), np.array([[1.0, 0.0], [0.5, 0.5]])]
    return {"mu": mu, "pi": pi, "R": np.zeros(4)}, "TV(answers) <= S", 1.0
