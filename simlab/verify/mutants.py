"""Claims tampered with: does the attack notice? False mutants must be caught, true ones must not.

`simlab verify` writes the table into its report; the tests run over the same list.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch

from simlab.core.quantile import order_statistic
from simlab.stabilizers import dppo, kpop, sat
from simlab.verify.claims import CLAIMS
from theory.search import Found, Side, attack
from theory.tables import Pair


class Mutant(NamedTuple):
    """One change of one claim. `search` tries suffice to find a false one without the known examples, by
    chance and simplex alone; 0 where that is not promised."""

    claim: int
    what: str
    false: bool
    sides: Callable[[dict], list[Side]]
    search: int = 0


def changed(
    claim: int, side: str, what: str, rhs: Callable[[float, dict], float], false=True, search=0
) -> Mutant:
    """A claim with another right-hand side of one side."""

    def sides(instance: dict) -> list[Side]:
        own = CLAIMS[claim].sides(instance)
        assert side in {s.name for s in own} or claim == 1  # T = 1 has a side of its own
        return [s._replace(rhs=rhs(s.rhs, instance)) if s.name == side else s for s in own]

    return Mutant(claim, f"{side}: {what}", false, sides, search)


def scaled(claim: int, side: str, factor: float, search=0, T=1) -> Mutant:
    """A constant that is wrong by a factor below 1, or loose above 1, from horizon T on."""
    where = f" from T = {T} on" if T > 1 else ""

    def rhs(old: float, instance: dict) -> float:
        return old * factor if T == 1 or len(instance["mu"]) >= T else old

    return changed(claim, side, f"x {factor}{where}", rhs, factor < 1, search)


def own_sat(claim: int, what: str, false=True, **functions) -> Mutant:
    """Claims 9 and 10 on a SAT with another `surrogate` or `whole_batch`."""
    method = SimpleNamespace(
        **{"surrogate": sat.surrogate, "whole_batch": sat.whole_batch} | functions
    )
    return Mutant(claim, f"SAT {what}", false, lambda x: CLAIMS[claim].sides(x, method))


def quantile(alpha: float = 0.9, interpolation: str = "lower", level: str | None = None):
    """A `whole_batch` of SAT by another rule."""

    def whole_batch(batches, *, level=level, fixed=level) -> dict:
        (b,) = batches
        u = sat.score(b, fixed or level).detach().abs()
        if interpolation == "lower":
            return {"q": order_statistic([(u, b.mask)], lambda n: (n * alpha).ceil().long())}
        return {"q": torch.quantile(u, alpha, interpolation=interpolation)}

    return whole_batch


def surrogate(**fixed) -> Callable:
    """SAT's surrogate with some of its arguments overruled."""
    return lambda b, **given: sat.surrogate(b, **given | fixed)


def with_d_max(instance: dict, power: float) -> float:
    """2 xi T(T-1) D_max^power (S/T)^(2 - power)."""
    p = Pair(**instance)
    return 2 * p.xi * p.T * (p.T - 1) * p.tv_max**power * (p.S / p.T) ** (2 - power)


MAX, HALF, TAIL = "Delta <= 2 xi T(T-1) D_max^2", "|Delta| <= 2 xi S", "|Delta| <= tail bound"
MUTANTS = [
    scaled(1, "|J(pi) - J(mu)| <= 2 xi TV(answers)", 0.95, 160),
    changed(1, "J(pi) - J(mu) = L' - Delta", "+ Delta", lambda _, x: Pair(**x).L + Pair(**x).Delta, search=160),
    changed(1, "J(pi) - J(mu) = L' - Delta", "L' alone", lambda _, x: Pair(**x).L, search=160),
    scaled(2, "TV(answers) <= S", 0.99, 160),
    scaled(2, "TV(answers) <= S", 0.99, T=5),
    changed(2, "TV(answers) <= S", "T D_max", lambda _, x: len(x["mu"]) * Pair(**x).tv_max, False),
    scaled(3, HALF, 0.8, 160),
    scaled(3, HALF, 0.975),
    scaled(3, HALF, 0.99, T=5),
    scaled(3, "Delta <= 4 xi S", 0.5, 0)._replace(false=False),
    scaled(4, MAX, 0.8, 400),
    scaled(4, MAX, 0.975),
    scaled(4, MAX, 0.95, T=3),
    scaled(4, MAX, 0.5, T=5),
    changed(4, MAX, "D_max S/T for D_max^2", lambda _, x: with_d_max(x, 1)),
    changed(4, MAX, "(S/T)^2 for D_max^2", lambda _, x: with_d_max(x, 0), search=160),
    changed(4, MAX, "+ S^3", lambda old, x: old + Pair(**x).S ** 3, False),
    scaled(5, TAIL, 0.95, 160),
    scaled(5, TAIL, 0.95, T=3),
    scaled(5, "Delta <= (D-a)", 0.9, 160),
    scaled(5, "Delta <= (D-a)", 0.95, T=5),
    scaled(6, "(1/2) E|r-1| + outside/2 = TV", 1.01, 160)._replace(false=True),
    changed(6, "(1/2) E|r-1| <= TV", "half of it", lambda old, _: old / 2, search=160),
    scaled(7, "TV <= el eh/(el+eh)", 0.99, 160),
    changed(7, "TV <= max(el, eh)/2", "min(el, eh)/2", lambda _, x: smaller_radius(x) / 2, search=160),
    scaled(7, "TV <= E max(low, high)/2", 0.99, 160),
    scaled(7, "TV <= min(E low, E high)", 0.99, 160),
    changed(7, "TV <= min(E low, E high)", "half of it", lambda old, _: old / 2, search=160),
    changed(7, "TV <= min(E low, E high)", "max", lambda _, x: float(max((x["mu"] * x["low"]).sum(), (x["mu"] * x["high"]).sum())), False),
    scaled(8, "TV <= 1 - mu(a)(1-eps)", 0.95, 160),
    own_sat(9, "with an interpolated quantile", whole_batch=quantile(interpolation="linear")),
    own_sat(9, "with the quantile 0.8", whole_batch=quantile(0.8)),
    own_sat(9, "with the token's d in the quantile of responses", whole_batch=quantile(level="token")),
    own_sat(9, "with kernel exponent 1", surrogate=surrogate(exponent=1.0)),
    own_sat(9, "with a constant factor 1/4", surrogate=surrogate(factor=0.25)),
    own_sat(9, "at token level on responses", surrogate=surrogate(level="token")),
    own_sat(9, "with the two radii swapped", surrogate=lambda b, *, eps_low, eps_high, **own: sat.surrogate(b, eps_low=eps_high, eps_high=eps_low, **own)),
    own_sat(9, "that never contracts", surrogate=lambda b, q, **own: sat.surrogate(b, q=0 * q, **own)),
    own_sat(9, "with the order statistic written otherwise", False, whole_batch=quantile()),
    own_sat(10, "with an interpolated quantile", whole_batch=quantile(interpolation="linear")),
    own_sat(10, "with kernel exponent 3", surrogate=surrogate(exponent=3.0)),
    own_sat(10, "with a hard cut at q", surrogate=surrogate(factor=0.0)),
    own_sat(10, "with the order statistic written otherwise", False, whole_batch=quantile()),
    scaled(10, "share cut beyond PPO <= 1 - alpha", 0.9, 160),
    scaled(11, "2 TV^2 <= KL", 0.95, 160),
    Mutant(11, "DPPO with KL(pi || mu)", True, lambda x: CLAIMS[11].sides(x, masks=REVERSED), 40),
    Mutant(11, "KPop with its directions swapped", True, lambda x: CLAIMS[11].sides(x, band=TURNED), 160),
    changed(11, "2 TV^2 <= KL", "TV^2", lambda old, _: 2 * old, False),
    scaled(13, "1 - sum p^2 <= H", 0.7),
    scaled(14, "misjudged cause <= all of it", 0.9, 160),
]  # fmt: skip
REVERSED = SimpleNamespace(
    binary=lambda kind, logp, logm: dppo.binary(kind, logm, logp),
    top_k=lambda kind, logp, logm, topk, topk_mu: dppo.top_k(kind, logm, logp, topk_mu, topk),
)
WAYS = {"both": "both", "forward": "reverse", "reverse": "forward"}
TURNED = SimpleNamespace(
    surrogate=lambda b, *, direction, **own: kpop.surrogate(b, direction=WAYS[direction], **own)
)


def smaller_radius(instance: dict) -> float:
    """min(el, eh) of the smallest constant envelope."""
    r = [p / m for p, m in zip(instance["p"], instance["mu"], strict=True) if m > 0]
    return max(min(1 - min(r), max(r) - 1), 0.0)


def tampered(mutant: Mutant, tight: bool = True) -> SimpleNamespace:
    """The claim with the mutant's sides; without `tight` its known examples are left out."""
    claim = CLAIMS[mutant.claim]
    own = {name: getattr(claim, name) for name in ("NUMBER", "TITLE", "SHAPES", "size", "decode")}
    return SimpleNamespace(**own, sides=mutant.sides, tight=claim.tight if tight else lambda: [])


def table(tries: int, seed: int = 0) -> list[dict]:
    """One row a mutant: claim, what was changed, whether it is false, whether it was caught, after how many
    instances."""
    rows = []
    for mutant in MUTANTS:
        record: Found = attack(tampered(mutant), tries, seed, first=True)
        row = {"claim": mutant.claim, "change": mutant.what, "false": mutant.false}
        rows.append(row | {"caught": record.violations > 0, "instances": record.tried})
    return rows
