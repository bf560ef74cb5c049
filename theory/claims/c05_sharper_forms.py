"""Claim 5. Three more forms; proofs below. Delta is unchanged by R + constant, so that rewards in
[0, 1], centred, have xi = 1/2.

(D-a)  Delta <= 4 xi sum_t E_mu D_TV[s_t] min(1, (T - t) D_max)
       Same proof as claims 3 and 4, both caps kept per position: E|r_t - 1| = 2 E D_TV[s_t], and the
       tail factor is at most 2 min(1, (T - t) D_max).
(D-b)  Delta <= 2 xi (S + TV(answers)) <= 2 xi (S + min(1, S))
       Delta = L' - dJ; |L'| <= xi sum_t E|r_t - 1| = 2 xi S, |dJ| <= 2 xi TV(answers); claim 2. The
       2 xi S of claim 3 is smaller still.
(tail) |L' - dJ| <= xi sum_t E_mu sum_a |pi - mu|(a|s_t) min(2, 2 C_{t+1}(s_t a)),
       C_t(s) = D_TV[s] + E_{a~mu} C_{t+1}(s a), C_{T+1} = 0
       In (31) the tail factor at (s_t, a) is E|1 - prod r| = 2 TV of the two continuations, at most 2
       and, by claim 2 started at (s_t, a), at most 2 C_{t+1}; and mu |r - 1| = |pi - mu|.
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
NUMBER, TITLE = 5, "Sharper forms"
STATEMENT = r"$|\Delta| \le$ tail bound $\le$ (D-a) $\le$ both forms; (D-b) $\le$ average form; else unordered"


def tail_bound(p: Pair) -> float:
    """The recursive state-wise bound."""
    total, later = 0.0, np.zeros(p.V**p.T)
    for t in range(p.T - 1, -1, -1):
        ahead = later.reshape(-1, p.V)
        gap = np.abs(p.pi[t] - p.mu[t])
        total += (p.visits[t][:, None] * gap * np.minimum(2, 2 * ahead)).sum()
        later = p.tvs[t] + (p.mu[t] * ahead).sum(-1)
    return p.xi * float(total)


def sides(instance: dict) -> list[Side]:
    """Each form against the remainder, and against the form that it sharpens."""
    p = Pair(**instance)
    p.need_support()
    delta, left = p.L - p.dJ, p.T - 1 - np.arange(p.T)
    a = 4 * p.xi * float((p.tv_mean * np.minimum(1, left * p.tv_max)).sum())
    b, tail = 2 * p.xi * (p.S + p.tv_answers), tail_bound(p)
    return [
        Side("Delta <= (D-a)", delta, a),
        Side("Delta <= (D-b)", delta, b),
        Side("|Delta| <= tail bound", abs(delta), tail),
        Side("(D-a) <= average form", a, 4 * p.xi * p.S),
        Side("(D-a) <= max form", a, 2 * p.xi * p.T * (p.T - 1) * p.tv_max**2),
        Side("(D-b) <= 2 xi (S + min(1, S))", b, 2 * p.xi * (p.S + min(1, p.S))),
        Side("(D-b) <= average form", b, 4 * p.xi * p.S),
        Side("tail bound <= (D-a)", tail, a),
    ]


def tight():
    """The two-token example attains the tail bound (and D-a) too; rare tokens come near at T = 3 and 5, and
    with TV at rare prefixes only the tail bound is half of (D-a)."""
    return [
        (two_token_example(), "|Delta| <= tail bound", 1.0),
        (rare_token_example(3), "|Delta| <= tail bound", 0.9985),
        (rare_token_example(5), "Delta <= (D-a)", 0.9955),
        (rare_prefix_example(2), "|Delta| <= tail bound", 1.0),
    ]
