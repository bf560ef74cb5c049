"""What may stand together in a composition `base+term+...`, and how it is put together.

The ratios that multiply each other, those of W and that of the base, must telescope to one of k = prox/mu,
u = pi/prox and r = pi/mu = k u, so that no factor counts twice. Which ratio a base has is found by probing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import NamedTuple

import torch

from simlab.core.tokens import KINDS, OPTIONAL, TOP, Surrogate, TokenBatch
from simlab.stabilizers.algebra import compose
from simlab.stabilizers.algebra.compose import Contract, Denominator, Norm, Parts, Term
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.words import page
from simlab.stabilizers.stabilizer import Stabilizer, needs

LAWFUL = ("", "k", "r", "u", "ku")
OF_MU = ("topk_mu", "entropy_mu", "gini_mu", "tv")  # no batch has them of prox


class Added(NamedTuple):
    """A term as it is written."""

    key: str  # its name, with a number where one of that name came before
    function: Callable[..., Correction | Surrogate]
    arguments: dict
    denominator: Denominator


def probe() -> TokenBatch:
    """32 tokens in 16 responses, with every optional field: log-ratios of -1 to 1 nat. float64."""
    d, one = torch.linspace(-1, 1, 32, dtype=torch.float64), torch.ones(32, dtype=torch.float64)
    whole, top = torch.zeros(32, dtype=torch.int64), (one * -4).unsqueeze(-1).expand(32, 2)
    fields: dict = {x: whole + 1 if KINDS.get(x) == torch.int64 else one / 2 for x in OPTIONAL}
    fields |= {"topk": top, "topk_mu": top - 0.1, "logp_prox": d / 2 - 2, "logp_ref": d / 3 - 2}
    A = torch.where(torch.arange(32) % 3 == 0, -one, one)
    return TokenBatch(d - 2, one * -2, A, one > 0, torch.arange(32) // 2, **fields)


def ratio_of(base: Stabilizer) -> str:
    """The ratio in a method's S: "prox" if it reads `logp_prox` itself, "r" if pi/mu, "" if it has none."""
    if "logp_prox" in needs(base):
        return "prox"
    b = probe()
    S = [base(x).S for x in (b, replace(b, logp_mu=b.logp_mu - 0.3))]
    return "" if torch.equal(*S) else "r"


def is_shared(base: Stabilizer) -> bool:
    """Whether S of one token has a gradient on another token of its response."""
    b = probe()
    logp = b.logp.clone().requires_grad_()
    (grad,) = torch.autograd.grad(base(replace(b, logp=logp)).S[::2].sum(), logp)
    return bool((grad[1::2] != 0).any())


def composed(
    name: str,
    arguments: dict,
    base: Stabilizer,
    added: list[Added],
    proximal: str | None,
    norm: Norm | None = None,
    contract: Contract | None = None,
    support: bool = False,
) -> Stabilizer:
    """The composition; `arguments` are all that were written.

    Raises ValueError, with the cure, for one that is not lawful.
    """
    corrections, extras, answers = [], [], []
    for x in added:
        shrinks = contract is not None and "shrink" in signature(x.function).parameters
        term = Term(x.key, partial(x.function, **x.arguments), x.denominator, shrinks)
        answer = term.function(probe())
        (corrections if isinstance(answer, Correction) else extras).append(term)
        answers += [(x.key, answer)] if isinstance(answer, Correction) else []
    reads_k = [key for key, answer in answers if answer.of == "k"]
    swap, own = _swap(name, base, reads_k, proximal)
    _check_factors(name, base, own, [(k, x.of) for k, x in answers if x.weight is not None])
    fields = set(needs(base)) - swap.keys()
    if swap.get("logp_mu") and (of_mu := sorted(fields & set(OF_MU))):
        raise ValueError(f"{name}: {base.name} reads {of_mu[0]}, and no batch has that of prox")
    fields |= {swap["logp_mu"]} if "logp_mu" in swap else set()
    fields |= {field for term in (*corrections, *extras) for field in needs(term.function)}
    if proximal is not None and not own and "logp_prox" not in fields:
        raise ValueError(
            f"{name}: {base.name} has no ratio, so proximal says nothing; leave it out"
        )
    if support:
        _check_support(name, fields)
        fields |= {*TOP}
    known = signature(base.surrogate).parameters
    takes_weight, takes_shrink = "W" in known, contract is not None and "shrink" in known
    if contract is not None:
        _check_contract(name, takes_shrink, (*corrections, *extras))
    if corrections and not takes_weight and is_shared(base):
        raise ValueError(
            f"{name}: {base.name} spreads a gradient over its response and takes no weights; give its "
            "surrogate an argument W: Tensor | None, which multiplies each token"
        )
    if norm is not None and not corrections:
        raise ValueError(f"{name}: norm divides W by its mean, and there is no W; add a correction")
    parts = Parts(
        name, base, takes_weight, takes_shrink, tuple(corrections), tuple(extras), norm, contract, support, swap,
        tuple(x for x in OPTIONAL if x in fields),
    )  # fmt: skip
    whole = base.whole_batch or norm is not None or contract is not None
    settings = base.settings | {f"{x.key}.{k}": v for x in added for k, v in _all(x).items()}
    return Stabilizer(
        name,
        arguments,
        partial(compose.surrogate, parts=parts),
        partial(compose.whole_batch, parts=parts) if whole else None,
        page(
            parts,
            [(x.key, x.function, x.arguments) for x in added],
            any(x.keep is not None for _, x in answers),
        ),
        settings | ({} if proximal is None else {"proximal": proximal}),
        partial(compose.leave, parts=parts)
        if any(x.denominator != "keep" for x in added)
        else None,
    )


def _check_support(name: str, fields: set[str]) -> None:
    """Raises ValueError where a part reads another policy than pi and mu."""
    if other := sorted(fields & {"logp_prox", "logp_ref", "entropy_prox"}):
        raise ValueError(
            f"{name}: support renormalises pi on the tokens that mu can draw, and {other[0]} is not "
            "renormalised; leave support out, or what reads it"
        )


def _check_contract(name: str, takes_shrink: bool, terms: tuple[Term, ...]) -> None:
    """Raises ValueError where nothing can be contracted, or the denominator would depend on it."""
    shrinking = [term for term in terms if term.takes_shrink]
    if not takes_shrink and not shrinking:
        raise ValueError(
            f"{name}: contract shrinks a radius, and no part has one that it can; it acts on ppo, dppo, spo, "
            "drpo and kl"
        )
    if leaving := [term.name for term in shrinking if term.denominator != "keep"]:
        raise ValueError(
            f"{name}: {leaving[0]} rejects by a contracted limit, and denominator must then be keep"
        )


def _all(x: Added) -> dict:
    """Every argument of a term, those left at their default included."""
    known = list(signature(x.function).parameters.values())[1:]
    return {p.name: x.arguments.get(p.name, p.default) for p in known} | {
        "denominator": x.denominator
    }


def _swap(
    name: str, base: Stabilizer, reads_k: list[str], proximal: str | None
) -> tuple[dict[str, str], str]:
    """Which field the base reads in the place of another, and the ratio that it then has."""
    own = ratio_of(base)
    if proximal == "mu" and reads_k:
        raise ValueError(
            f"{name}: {reads_k[0]} reads k = prox/mu, and with proximal=mu the ratio of {base.name} is pi/mu, "
            "which holds k already; leave proximal=mu out (the ratio is then pi/prox), or correct by of=r"
        )
    if own == "prox" and proximal == "mu":
        return {"logp_prox": "logp_mu"}, own
    if own == "r" and (reads_k or proximal not in (None, "mu")):
        return {"logp_mu": "logp_prox"}, "u"
    return {}, own


def _check_factors(name: str, base: Stabilizer, own: str, weights: list[tuple[str, str]]) -> None:
    """Raises ValueError unless the ratios telescope."""
    if not weights:
        return
    key, of = weights[-1]
    if own == "prox":
        raise ValueError(
            f"{name}: {key} weighs by {of}, and {base.name} has a weight of its own from logp_prox; put {key} "
            "on a base without one (ppo, gspo, pg, none), or use keep, which does not weigh"
        )
    factors = "".join(sorted([own, *(of for _, of in weights)]))
    if factors not in LAWFUL:
        twice = " and ".join(f"{k} by {of}" for k, of in weights)
        ratio = f"the ratio of {base.name} is {own}" if own else f"{base.name} has no ratio"
        raise ValueError(
            f"{name}: {twice} weigh where {ratio}, which counts a factor of r = pi/mu = (prox/mu)(pi/prox) "
            "twice; weigh once, by k on a method with a ratio or by r on none, and let the others be keep"
        )
