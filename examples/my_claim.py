"""A bound of one's own, attacked: `simlab verify --claim-file examples/my_claim.py`.

    D_TV(mu, pi) <= (1/2) sqrt(chi2),   chi2 = E_mu (r - 1)^2,   pi << mu

Proof: D_TV = (1/2) E_mu |r - 1|, and E|x| <= sqrt(E x^2) (Jensen). Attained where |r - 1| is constant, such as by
two equally likely tokens. With sqrt(chi2) replaced by chi2 it is false: the attack finds it at once, leaves the
counterexample and exits with 1.
"""

from __future__ import annotations

import numpy as np

from theory.search import Side
from theory.tables import softmax, tv

NUMBER, TITLE = 100, "TV and chi-square"
STATEMENT = r"$D_{TV} \le \frac{1}{2} \sqrt{E_\mu (r - 1)^2}$"
SHAPES = [{"V": V} for V in (2, 5)]  # settings to try


def size(shape: dict) -> int:
    """Entries of the real vector that describes an instance: logits of mu, and their change."""
    return 2 * shape["V"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """The instance of a vector: what `sides` reads, arrays and numbers."""
    mu = softmax(x[: shape["V"]])
    return {"mu": mu, "p": softmax(x[: shape["V"]] + x[shape["V"] :])}


def sides(instance: dict) -> list[Side]:
    """Inequalities lhs <= rhs, or identities (equal=True); an instance outside the assumptions raises ValueError."""
    mu, p = instance["mu"], instance["p"]
    chi2 = float((mu * (p / mu - 1) ** 2).sum())
    return [Side("TV <= sqrt(chi2)/2", float(tv(mu, p)), np.sqrt(chi2) / 2)]


def tight() -> list[tuple[dict, str, float]]:
    """Known extreme instances with the name of a side and its lhs / rhs there; may be empty."""
    instance = {"mu": np.array([0.5, 0.5]), "p": np.array([0.6, 0.4])}
    return [(instance, "TV <= sqrt(chi2)/2", 1.0)]
