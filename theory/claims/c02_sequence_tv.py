"""Claim 2. The TV of whole answers is at most the expected sum of one-step TVs, (32).

    D_TV(mu_T || pi_T) <= S = sum_t E_{s_t ~ mu} D_TV(mu(.|s_t) || pi(.|s_t))

No support assumption (the instances here have pi << mu). Proof: the telescoping sum of claim 1 and the triangle inequality; the
trailing product of pi sums to 1 over the later tokens, the leading product of mu is the visitation.
Equality iff for each answer the non-zero terms of the telescoping sum have one sign: later tokens do
not undo earlier ones.
"""

from __future__ import annotations

import numpy as np

from theory.instances import SHAPES, decode, rare_token_example, size
from theory.search import Side
from theory.tables import Pair

__all__ = ["SHAPES", "decode", "size"]
NUMBER, TITLE = 2, "Sequence TV"
STATEMENT = r"$D_{TV}(\mu_T \| \pi_T) \le S = \sum_t E_\mu D_{TV}[s_t]$"


def sides(instance: dict) -> list[Side]:
    """(32)."""
    p = Pair(**instance)
    return [Side("TV(answers) <= S", p.tv_answers, p.S)]


def tight():
    """Two tokens: pi leans to 0, and after 0 leans to 0 again; both sides are 0.45. Rare tokens that all
    become likelier hardly undo each other: near equality at T = 3 and 5."""
    mu = [np.full((1, 2), 0.5), np.full((2, 2), 0.5)]
    pi = [np.array([[0.7, 0.3]]), np.array([[1.0, 0.0], [0.5, 0.5]])]
    leaning = {"mu": mu, "pi": pi, "R": np.zeros(4)}
    rare = ((rare_token_example(T), "TV(answers) <= S", (1 - 1e-3) ** (T - 1)) for T in (3, 5))
    return [(leaning, "TV(answers) <= S", 1.0), *rare]
