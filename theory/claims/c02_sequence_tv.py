"""Claim 2. The TV of whole answers is at most the expected sum of one-step TVs, (32).

    D_TV(mu_T || pi_T) <= S = sum_t E_{s_t ~ mu} D_TV(mu(.|s_t) || pi(.|s_t))

No support assumption. Proof: the telescoping sum of claim 1 and the triangle inequality; the
trailing product of pi sums to 1 over the later tokens, the leading product of mu is the visitation.
Tight whenever later tokens do not undo earlier ones, for instance T = 1.
"""

from __future__ import annotations

from theory.instances import SHAPES, decode, size, two_token_example
from theory.search import Side
from theory.tables import Pair

__all__ = ["SHAPES", "decode", "size"]
NUMBER, TITLE = 2, "Sequence TV"
STATEMENT = "D_TV(mu_T || pi_T) <= sum_t E_mu D_TV[s_t]"


def sides(instance: dict) -> list[Side]:
    """(32), and the trivial cap of 1."""
    p = Pair(**instance)
    return [
        Side("TV(answers) <= S", p.tv_answers, p.S),
        Side("TV(answers) <= 1", p.tv_answers, 1.0),
    ]


def tight():
    """One token: both sides are the same number."""
    pair = two_token_example()
    return {"mu": pair["mu"][:1], "pi": pair["pi"][:1], "R": pair["R"][:2]}, "TV(answers) <= S", 1.0
