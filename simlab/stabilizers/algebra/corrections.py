"""Corrections: constant factors W of a surrogate, each a map of one statistic of the batch.

A composition `base+correction+...` (compose.py) is S = W shape(L, A); W is the product of these, and 0
where one of them rejects. A correction is a function of the batch that returns `Correction`, and its
docstring says in words, with its arguments in braces, what it does. A method of the registry whose rule
can stand on another base has such a function too, `correction`, beside its `surrogate`; a function
that returns a `Surrogate` is added to S instead.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.kl import KL, overflow
from simlab.core.per_response import response_sums, to_tokens
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, graded, on_mask, ratio
from simlab.stabilizers import centering
from simlab.stabilizers.algebra.statistics import (
    Gate,
    Ratio,
    Reduction,
    divergence,
    log_of,
    reduced,
)
from simlab.stabilizers.contraction import LEAST
from simlab.stabilizers.parts import Above0, BandHigh, BandLow, check_band, in_band

Number = Annotated[float, Interval("[-inf, inf]")]
WeightLevel = Literal["token", "sum", "mean", "prefix"]


class Correction(NamedTuple):
    """What a correction does to the tokens of a batch, without gradient."""

    of: Ratio  # what it reads: k = prox/mu, r = pi/mu or u = pi/prox
    weight: Tensor | None  # [..., N], at least 0, a power of that ratio; None is 1
    keep: Tensor | None  # [..., N] bool, False where a token is rejected; None rejects none
    diagnostics: dict[str, Diagnostic]

    @property
    def W(self) -> Tensor:
        """The factor `[..., N]`: the weight, 0 where rejected."""
        if self.keep is None:
            assert self.weight is not None, "a correction that neither weighs nor rejects"
            return self.weight
        return torch.where(self.keep, 1.0 if self.weight is None else self.weight, 0.0)


def cap(
    b: TokenBatch, *, of: Ratio = "r", level: WeightLevel = "token", max: Above0 = math.inf
) -> Correction:
    """W = {of} {level}, at most {max}"""
    x = ratio(reduced(b, log_of(b, of, "cap"), level))
    return Correction(of, x.clamp(max=max), None, {"capped": Diagnostic(x > max, "mean")})


def clamp(
    b: TokenBatch,
    *,
    of: Ratio = "r",
    level: WeightLevel = "token",
    low: BandLow = 0.0,
    high: BandHigh = math.inf,
) -> Correction:
    """W = {of} {level}, raised to {low} and cut down to {high}"""
    check_band("clamp", low, high)
    x = ratio(reduced(b, log_of(b, of, "clamp"), level))
    outside = Diagnostic((x < low) | (x > high), "mean")
    return Correction(of, x.clamp(low, high), None, {"capped": outside})


def band(
    b: TokenBatch,
    *,
    of: Ratio = "r",
    level: WeightLevel = "token",
    low: BandLow = 0.5,
    high: BandHigh = 5.0,
    strict: bool = False,
) -> Correction:
    """W = {of} {level}, and 0 unless it is from {low} to {high}{strict}"""
    check_band("band", low, high)
    x = reduced(b, log_of(b, of, "band"), level)
    inside = inside_of(x, low, high, strict)
    return Correction(of, ratio(x), inside, {"out_of_band": Diagnostic(~inside, "mean")})


def inside_of(x: Tensor, low: float, high: float, strict: bool) -> Tensor:
    """low <= exp(x) <= high, or < where strict, tested on the log-ratio."""
    if not strict:
        return in_band(x, low, high)
    return (x > (math.log(low) if low else -math.inf)) & (x < math.log(high))


def keep(
    b: TokenBatch,
    *,
    gate: Gate = "ratio",
    of: Ratio = "r",
    level: Reduction = "token",
    min: Number = -math.inf,
    max: Number = math.inf,
    side: Literal["both", "outward", "negative"] = "both",
    scope: Literal["token", "response"] = "token",
    strict: bool = False,
    weight: WeightLevel | None = None,
) -> Correction:
    """keeps a {scope} only if the {gate} of {of}, {level}, is from {min} to {max}{strict}{side}{weight}"""
    if not min < max or (min, max) == (-math.inf, math.inf):
        raise ValueError(f"keep: give min or max, and min below max; got {min}, {max}")
    x = reduced(b, divergence(b, of, gate, "keep"), level)
    low, high = (log_limit(y) if gate == "ratio" else y for y in (min, max))
    inside = (x > low) & (x < high) if strict else (x >= low) & (x <= high)
    rejected, A = b.mask & ~inside, on_mask(b, b.advantage)
    if side == "outward":
        rejected = rejected & (A * log_of(b, of, "keep") > 0)
    if side == "negative":
        rejected = rejected & (A < 0)
    if scope == "response":
        rejected = to_tokens(b, response_sums(b, rejected.long())) > 0
    W = None if weight is None else ratio(reduced(b, log_of(b, of, "keep"), weight))
    return Correction(of, W, ~rejected, {"rejected": Diagnostic(rejected, "mean")})


def log_limit(x: float) -> float:
    """log x, -inf for anything at or below 0."""
    return math.log(x) if x > 0 else -math.inf


def veto(b: TokenBatch, *, of: Ratio = "r", min: BandLow = 1e-4) -> Correction:
    """rejects a response of which one token has {of} below {min}"""
    return keep(b, of=of, level="min", min=min)


def kl(
    b: TokenBatch,
    *,
    coef: Above0,
    kind: Literal["k1", "k2", "k3"] = "k2",
    to: Literal["mu", "prox", "ref"] = "mu",
    shrink: Tensor | None = None,
) -> Surrogate:
    """adds -{coef} times {kind} of log pi - log {to}, on rejected tokens too

    `shrink` `[..., N]` divides the coefficient (`+contract`)."""
    logp, anchor = (on_mask(b, x) for x in (b.logp, b.need(f"logp_{to}", "kl").detach()))
    with torch.no_grad():
        each = coef if shrink is None else coef / shrink.clamp(min=LEAST)
        x, value = logp - anchor, KL[kind](logp, anchor)
        slope = {"k1": torch.ones_like(x), "k2": x, "k3": -torch.expm1(-x)}[kind]
        w = torch.where(b.mask & ~overflow(logp, anchor), -each * slope, 0.0)
    name = f"kl_{to}"
    return Surrogate(graded(logp, -each * value, w), w != 0, {name: Diagnostic(value, "mean")})


TERMS = {
    "band": band,
    "cap": cap,
    "centering": centering.extra,
    "clamp": clamp,
    "keep": keep,
    "kl": kl,
    "veto": veto,
}
