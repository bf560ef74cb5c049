"""S = W shape(L, A) + extras: a method of the registry with corrections on it, `base+correction+...`.

In this order, and in no other:

0. `support` replays a sampler that truncates: pi is renormalised on the tokens that mu can draw. `contract` finds
   SAT's factor c of every token; each part with an argument `shrink` gets it.
1. every correction looks at all active tokens, whatever another one rejects or caps. Only after a correction
   with `denominator=shrink` do the following ones see what it has left.
2. W is the product of the weights, 0 where one of the corrections rejects; with `norm` it is divided by its
   mean over the whole batch.
3. the base forms S from its ratio L, the advantages and W. L is pi/prox where a correction reads k = prox/mu or
   `proximal` is given, and pi/mu otherwise or with `proximal=mu`.
4. extras are added, on every token.
5. a rejected token has no gradient and stays in the denominator of the loss (`denominator=keep`), or leaves the
   mask, and with it the statistics of the base (`drop`, `shrink`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from simlab.core.head import on_support
from simlab.core.per_response import response_sums
from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.parts import HELD
from simlab.stabilizers.stabilizer import Stabilizer

Denominator = Literal["keep", "drop", "shrink"]
Norm = Callable[[TokenBatch, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class Term(NamedTuple):
    """A correction or an extra with its arguments filled in."""

    name: str
    function: Callable[[TokenBatch], Correction | Surrogate]
    denominator: Denominator = "keep"
    takes_shrink: bool = False


class Contract(NamedTuple):
    """The word `contract` with its arguments filled in."""

    quantile: Callable[..., Tensor]  # batches, reduce= -> q `[...]`
    factor: Callable[..., Tensor]  # b, q= -> c `[..., N]`


class Parts(NamedTuple):
    """What a composition is made of."""

    name: str
    base: Stabilizer
    takes_weight: bool  # whether the base has an argument W; else S is multiplied afterwards
    takes_shrink: bool
    corrections: tuple[Term, ...]
    extras: tuple[Term, ...]
    norm: Norm | None  # batch, W, keep -> sum of W and its count `[...]`
    contract: Contract | None
    support: bool
    swap: dict[str, str]  # the field that the base reads in the place of another
    fields: tuple[str, ...]  # optional fields that a part reads


class Weights(NamedTuple):
    """What the corrections of a composition say together."""

    W: Tensor | None  # [..., N]
    keep: Tensor | None  # [..., N] bool, in no correction rejected
    kept: Tensor | None  # [..., N] bool, still in the mask; None: all of it
    diagnostics: dict[str, Diagnostic]


def joined(one: dict[str, Diagnostic], two: dict[str, Diagnostic]) -> dict[str, Diagnostic]:
    """Both; a share of tokens that both have is the share that is in either."""
    both = {
        name: Diagnostic(torch.logical_or(x.value, two[name].value), "mean")
        for name, x in one.items()
        if name in two and x.value.dtype == torch.bool
    }
    return one | two | both


def ready(b: TokenBatch, parts: Parts) -> TokenBatch:
    """b with its support replayed, if parts say so. Raises ValueError, naming it, for a missing field."""
    for name in parts.fields:
        b.need(name, parts.name)
    return on_support(b, parts.name) if parts.support else b


def shrinking(b: TokenBatch, parts: Parts, q: Tensor | None) -> dict[str, Tensor]:
    """The argument of the parts that take it: c `[..., N]`, from the ratio of the base."""
    if parts.contract is None:
        return {}
    return {"shrink": parts.contract.factor(seen_by_base(b, parts, None), q=q)}


def weights(b: TokenBatch, parts: Parts, shrink: dict[str, Tensor]) -> Weights:
    """W and who is rejected, without gradient."""
    W = keep = kept = None
    diagnostics, seen = {}, b
    for term in parts.corrections:
        c = term.function(seen, **(shrink if term.takes_shrink else {}))
        assert isinstance(c, Correction)
        if c.weight is not None:
            W = c.weight if W is None else (W * c.weight).clamp(max=HELD)
        if c.keep is not None:
            inside = c.keep | ~seen.mask
            keep = inside if keep is None else keep & inside
            if term.denominator != "keep":
                kept = inside if kept is None else kept & inside
            if term.denominator == "shrink":
                seen = seen.without(~c.keep)
        diagnostics = joined(diagnostics, c.diagnostics)
    if keep is not None:
        W = torch.where(keep, 1.0 if W is None else W, 0.0).to(b.dtype)
    return Weights(W, keep, kept, diagnostics)


def seen_by_base(b: TokenBatch, parts: Parts, kept: Tensor | None) -> TokenBatch:
    """b with the fields of `swap`, without the tokens that have left the denominator."""
    swapped = {old: getattr(b, field) for old, field in parts.swap.items()}
    b = replace(b, **swapped) if swapped else b
    return b if kept is None else b.without(~kept)


def under(base: Stabilizer, b: TokenBatch, W: Tensor, stats: dict) -> Surrogate:
    """W times what a base without an argument W returns; each of its tokens has a gradient of its own."""
    out = base.surrogate(b, **stats)
    far = (out.S.detach() * W).abs() > HELD
    S = torch.where(far, out.S.detach().sign() * HELD, out.S * W)
    overflow = {"overflow": Diagnostic(far, "mean")} if "overflow" in out.diagnostics else {}
    return out._replace(
        S=S,
        active=out.active & (W != 0) & ~far,
        diagnostics=joined(out.diagnostics, overflow),
    )


def mean_of(
    b: TokenBatch,
    W: Tensor,
    keep: Tensor | None,
    *,
    over: Literal["accepted", "all"] = "accepted",
    level: Literal["token", "response"] = "token",
) -> tuple[Tensor, Tensor]:
    """Sum and count of W `[...]` over the tokens, or over the responses by their mean."""
    mask = b.mask if keep is None or over == "all" else b.mask & keep
    W = torch.where(mask, W, 0.0)
    if level == "token":
        return W.double().sum(-1), mask.sum(-1)
    tokens = response_sums(b, mask.long())
    means = response_sums(b, W.double()) / tokens.clamp(min=1)
    return means.sum(-1), (tokens > 0).sum(-1)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    parts: Parts,
    reduce: Reduce | None = None,
    previous: dict | None = None,
) -> dict:
    """The numbers of the base over what it sees, {"mean_weight": `[...]`} with `norm`, {"contract_q"} with
    `contract`."""
    batches, narrowed, sums, q = [ready(b, parts) for b in batches], [], [], None
    if parts.contract is not None:
        q = parts.contract.quantile([seen_by_base(b, parts, None) for b in batches], reduce=reduce)
    for b in batches:
        W, keep, kept, _ = weights(b, parts, shrinking(b, parts, q))
        narrowed.append(seen_by_base(b, parts, kept))
        if parts.norm is not None and W is not None:
            sums.append(parts.norm(b, W, keep))
    stats = parts.base.stats(narrowed, reduce, previous)
    stats = stats if q is None else stats | {"contract_q": q}
    if sums:
        total, count = (summed(x, reduce) for x in zip(*sums, strict=True))
        mean = total / count.clamp(min=1)
        stats = stats | {"mean_weight": torch.where(mean > 0, mean, 1.0)}
    return stats


def surrogate(
    b: TokenBatch,
    *,
    parts: Parts,
    mean_weight: Tensor | None = None,
    contract_q: Tensor | None = None,
    **stats,
) -> Surrogate:
    """The base under W, plus the extras."""
    b = ready(b, parts)
    shrink = shrinking(b, parts, contract_q)
    W, _, kept, diagnostics = weights(b, parts, shrink)
    if mean_weight is not None and W is not None:
        mean_weight = mean_weight.to(W).unsqueeze(-1)
        W = W / mean_weight
        diagnostics |= {"mean_weight": Diagnostic(mean_weight, "max")}
    own = seen_by_base(b, parts, kept)
    stats |= shrink if parts.takes_shrink else {}
    if W is None or parts.takes_weight:
        out = parts.base.surrogate(own, **({} if W is None else {"W": W}), **stats)
    else:
        out = under(parts.base, own, W, stats)
    S, active, shares = out
    for term in parts.extras:
        extra = term.function(b, **(shrink if term.takes_shrink else {}))
        assert isinstance(extra, Surrogate)
        S, active, shares = S + extra.S, active | extra.active, joined(shares, extra.diagnostics)
    if kept is not None:
        S, active = torch.where(kept, S, 0.0), active & kept
    return Surrogate(S, active, joined(shares, diagnostics))


def leave(b: TokenBatch, *, parts: Parts) -> Tensor:
    """Tokens that corrections take out of the mask `[..., N]`; what `contract` shrinks takes out none."""
    kept = weights(ready(b, parts), parts, {}).kept
    return torch.zeros_like(b.mask) if kept is None else ~kept
