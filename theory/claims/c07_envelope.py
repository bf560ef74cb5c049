"""Claim 7. A ratio envelope over ALL actions bounds the TV: Prop. 3.2, (6), (7), and a sharper form.

    pi << mu, 1 - el <= r(a) <= 1 + eh for every a   =>   D_TV <= el eh / (el + eh) <= max(el, eh) / 2

Proof of the first: E_mu (r - 1) = 0. On [-el, eh], |x| lies below its chord
el + (x + el)(eh - el)/(eh + el); the mean of the chord at E x = 0 is 2 el eh/(el + eh). Half of it
bounds (1/2) E|r - 1| = D_TV. The second: half the harmonic mean against
half the maximum; equal iff el = eh. Without pi << mu it fails: mu = (1, 0), pi = (.7, .3).
Attained by the two-point law P(r = 1 + eh) = el/(el + eh); at (.2, .28) it is .1167, the paper's .14.
"""

from __future__ import annotations

import numpy as np

from theory.search import Side
from theory.tables import softmax, tv

NUMBER, TITLE = 7, "Ratio envelope"
STATEMENT = "pi << mu, 1-el <= r <= 1+eh for all a  =>  D_TV <= el eh/(el+eh) <= max(el, eh)/2"
SHAPES = [{"V": V} for V in (2, 3, 5, 10)]


def size(shape: dict) -> int:
    """Logits of mu and of pi."""
    return 2 * shape["V"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"mu", "p"}, pi near mu; the envelope is the smallest that holds."""
    V = shape["V"]
    return {"mu": softmax(x[:V]), "p": softmax(x[:V] + 0.5 * np.tanh(x[V:]))}


def sides(instance: dict) -> list[Side]:
    """TV against both bounds of the instance's own envelope."""
    mu, p = np.asarray(instance["mu"]), np.asarray(instance["p"])
    if ((mu == 0) & (p > 0)).any():
        raise ValueError("the claim needs pi << mu, and mu misses a token that pi has")
    r = p[mu > 0] / mu[mu > 0]
    el, eh = max(1 - r.min(), 0.0), max(r.max() - 1, 0.0)
    sharp = el * eh / (el + eh) if el + eh > 0 else 0.0
    return [
        Side("TV <= el eh/(el+eh)", float(tv(mu, p)), sharp),
        Side("TV <= max(el, eh)/2", float(tv(mu, p)), max(el, eh) / 2),
    ]


def tight():
    """The two-point law at (.2, .28)."""
    el, eh = 0.2, 0.28
    mu = np.array([el, eh]) / (el + eh)
    return {"mu": mu, "p": mu * np.array([1 + eh, 1 - el])}, "TV <= el eh/(el+eh)", 1.0
