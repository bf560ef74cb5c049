"""Claim 3. The improvement bound in its average form, (34), why it certifies nothing, and half of it.

    J(pi) - J(mu) >= L' - 4 xi S,   S = E_mu sum_t D_TV[s_t],   |R| <= xi, pi << mu

Proof: by claim 1 it is Delta <= 4 xi S. In Delta, E |1 - prod_{j>t} r_j| given the prefix is twice a
total variation, at most 2; and E_mu |r_t - 1| = 2 E_mu D_TV[s_t]. So Delta <= xi 2 sum_t 2 E_mu D_TV.

It certifies nothing: |L'| <= xi sum_t E_mu |r_t - 1| = 2 xi S, so L' - 4 xi S <= -2 xi S, and by claim 2
that is at most -2 xi D_TV(answers) <= J(pi) - J(mu), which needs no L' at all. The average form never
promises an improvement, however small S is. (Not in the paper.)

The constant is twice too large: |Delta| <= 2 xi S. (Not in the paper.) Proof: write x_t = r_t - 1 >= -1
and P = prod_t r_t. Then L' - dJ = E_mu[R (sum_t x_t - (P - 1))] = E_mu[R Z], Z = 1 + sum_t x_t - P. Z has
mean 0 since E x_t = 0 and E P = 1, so E|Z| = 2 E max(Z, 0). With x = x^+ - x^-, P >= prod_t (1 - x_t^-)
>= 1 - sum_t x_t^- (Weierstrass, 0 <= x_t^- <= 1), so Z <= sum_t x_t^+, and E_mu x_t^+ = E_mu D_TV[s_t].
Hence |Delta| <= xi E|Z| <= 2 xi S. Approached by two tokens: mu_1 = (1-e, e), pi_1 = (e, 1-e), after token
1 the same again, after token 0 both uniform, pi = mu later, R the sign of Z, e -> 0. Still L' - 2 xi S <= 0.
"""

from __future__ import annotations

from theory.instances import SHAPES, decode, half_example, size
from theory.search import Side
from theory.tables import Pair

__all__ = ["SHAPES", "decode", "size"]
NUMBER, TITLE = 3, "Improvement bound, average form"
STATEMENT = r"$J(\pi) - J(\mu) \ge L' - 4 \xi S$; in fact $|\Delta| \le 2 \xi S$; neither certifies an improvement"


def sides(instance: dict) -> list[Side]:
    """The penalty of the paper, half of it, and L' against what it would have to beat."""
    p = Pair(**instance)
    p.need_support()
    return [
        Side("Delta <= 4 xi S", p.L - p.dJ, 4 * p.xi * p.S),
        Side("|Delta| <= 2 xi S", abs(p.L - p.dJ), 2 * p.xi * p.S),
        Side("|L'| <= 2 xi S", abs(p.L), 2 * p.xi * p.S),
        Side("L' + 2 xi TV(answers) <= 4 xi S", p.L + 2 * p.xi * p.tv_answers, 4 * p.xi * p.S),
    ]


def tight():
    """The example of the docstring at e = 1e-9: 2 xi S is attained in the limit, at every T >= 2."""
    return [(half_example(T), "|Delta| <= 2 xi S", 1.0) for T in (2, 3, 5)]
