"""Claim 3. The improvement bound in its average form, (34).

    J(pi) - J(mu) >= L' - 4 xi E_mu sum_t D_TV[s_t],   |R| <= xi, pi << mu

Proof: by claim 1 it is Delta <= 4 xi S. In Delta, E |1 - prod_{j>t} r_j| given the prefix is twice a
total variation, at most 2; and E_mu |r_t - 1| = 2 E_mu D_TV[s_t]. So Delta <= xi 2 sum_t 2 E_mu D_TV.
Vacuous once 4 xi S exceeds 2 xi, the range of J: S >= 1/2. By claim 5 (D-b) the ratio can never
pass 1/2 + 1/(2S) for S >= 1: no instance attains it.
"""

from __future__ import annotations

from theory.instances import SHAPES, decode, size, two_token_example
from theory.search import Side
from theory.tables import Pair

__all__ = ["SHAPES", "decode", "size"]
NUMBER, TITLE = 3, "Improvement bound, average form"
STATEMENT = "J(pi) - J(mu) >= L' - 4 xi E_mu sum_t D_TV[s_t]"


def sides(instance: dict) -> list[Side]:
    """The remainder of claim 1 against the penalty."""
    p = Pair(**instance)
    return [Side("Delta <= 4 xi S", p.L - p.dJ, 4 * p.S)]


def tight():
    """The best known: .2 of the penalty on the two-token example (Delta = 4 d^2, S = 2 d)."""
    return two_token_example(0.2), "Delta <= 4 xi S", 0.1
