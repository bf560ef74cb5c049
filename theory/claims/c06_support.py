"""Claim 6. The TV identity (5), what truncation does to it, and what repairs it.

    pi << mu:  D_TV(mu || pi) = (1/2) E_{a~mu} |r(a) - 1|
    else:      D_TV(mu || pi) = (1/2) E_{a~mu} |r(a) - 1| + (1/2) pi(a: mu(a) = 0)

Proof: sum |pi - mu| over the support of mu is E_mu |r - 1|; off it, it is pi's mass there. Counter-
example: mu = (1, 0), pi = (0.7, 0.3) has TV 0.30 and (1/2) E_mu |r - 1| = 0.15; with R = (0, 1), J moves
by 0.3 and L' by 0. Half of the truth is the worst case: TV is at least the uncovered mass.
Two repairs of a top-k or top-p engine, both of which restore the identity: the engine samples from
everything; or the trainer's softmax is restricted to the engine's nucleus and renormalised (the
nucleus is "replayed", SAT (50)), so that pi' << mu.
"""

from __future__ import annotations

import numpy as np

from theory.search import Side
from theory.tables import softmax, tv

NUMBER, TITLE = 6, "TV identity and its failure under truncation"
STATEMENT = (
    r"$D_{TV} = \frac{1}{2} E_\mu |r - 1|$ iff $\pi \ll \mu$; the gap is half the uncovered mass"
)
SHAPES = [{"V": V, "keep": keep} for V in (2, 3, 6) for keep in range(1, V + 1)]


def size(shape: dict) -> int:
    """Logits of pi and of the engine's own (noisy) softmax."""
    return 2 * shape["V"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"p", "mu"}: mu keeps its `keep` likeliest tokens, renormalised."""
    V = shape["V"]
    full = softmax(x[:V] + 0.3 * x[V:])
    kept = np.argsort(-full, kind="stable")[: shape["keep"]]
    mu = np.zeros(V)
    mu[kept] = full[kept] / full[kept].sum()
    return {"p": softmax(x[:V]), "mu": mu}


def half_expectation(p: np.ndarray, mu: np.ndarray) -> float:
    """(1/2) E_{a~mu} |p/mu - 1|."""
    on = mu > 0
    return float((mu[on] * np.abs(p[on] / mu[on] - 1)).sum() / 2)


def sides(instance: dict) -> list[Side]:
    """The identity with its correction, the inequality without, and the replayed nucleus."""
    p, mu = np.asarray(instance["p"]), np.asarray(instance["mu"])
    outside = float(p[mu == 0].sum())
    replayed = np.where(mu > 0, p, 0) / p[mu > 0].sum()
    return [
        Side(
            "(1/2) E|r-1| + outside/2 = TV", half_expectation(p, mu) + outside / 2, tv(p, mu), True
        ),
        Side("(1/2) E|r-1| <= TV", half_expectation(p, mu), float(tv(p, mu))),
        Side("TV <= E|r-1|", float(tv(p, mu)), 2 * half_expectation(p, mu)),
        Side("replayed nucleus: identity", half_expectation(replayed, mu), tv(replayed, mu), True),
    ]


def tight():
    """mu = (1, 0), pi = (0.7, 0.3): the formula reports half of the truth."""
    return [({"p": np.array([0.7, 0.3]), "mu": np.array([1.0, 0.0])}, "TV <= E|r-1|", 1.0)]
