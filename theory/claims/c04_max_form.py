"""Claim 4. The improvement bound in its max form, (33), and the minimum of both, (36).

    J(pi) - J(mu) >= L' - 2 xi T (T - 1) (D_max)^2,   D_max = largest TV at a prefix that mu reaches

Proof: as claim 3, but E |1 - prod_{j>t} r_j| is at most 2 (T - t) D_max by claim 2 applied to the
tail, and E |r_t - 1| at most 2 D_max; sum_t (T - t) = T (T - 1) / 2.
Attained at T = 2: mu = (1/2, 1/2), pi = (1/2 + d, 1/2 - d) everywhere, R = xi times the sign of the
remainder gives Delta = 4 xi d^2 on both sides. Approached at every T: mu = (1 - p, p), pi = (1 - p - d,
p + d) everywhere with d << p << 1/T. There the remainder is -(e_2 + e_3 + ...) in the x_t = r_t - 1;
E|e_2| is T(T-1)/2 d^2 from answers without a rare token, T(T-1) d^2 from those with one and
T(T-1)/2 d^2 from those with two, together 2 T(T-1) d^2, and E|e_k| <= C(T, k) (2d)^k is smaller for k >= 3.
The constant is thus right at every horizon; a random search alone does not find this. D_max^2 cannot be
D_max S/T: where the policies differ at the first token by a shift among rare ones, and later only after those,
Delta is twice that (`rare_prefix_example`).
"""

from __future__ import annotations

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
NUMBER, TITLE = 4, "Improvement bound, max form and minimum"
STATEMENT = r"$J(\pi) - J(\mu) \ge L' - \min(2 \xi T(T-1) D_{max}^2,\ 4 \xi S)$"


def sides(instance: dict) -> list[Side]:
    """(33) and (36)."""
    p = Pair(**instance)
    p.need_support()
    form = 2 * p.xi * p.T * (p.T - 1) * p.tv_max**2
    delta = p.L - p.dJ
    return [
        Side("Delta <= 2 xi T(T-1) D_max^2", delta, form),
        Side("Delta <= min(max form, average form)", delta, min(form, 4 * p.xi * p.S)),
    ]


def tight():
    """Equality at T = 2, in two ways; rare tokens at T = 3 and 5; TV at rare prefixes only, 2/T of it."""
    side = "Delta <= 2 xi T(T-1) D_max^2"
    return [
        (two_token_example(), side, 1.0),
        (rare_token_example(3), side, 0.9985),
        (rare_token_example(5), side, 0.9955),
        (rare_prefix_example(2), side, 1.0),
        (rare_prefix_example(3), side, 0.6567),
    ]
