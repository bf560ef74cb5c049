"""Padded batches for the peers, the flat view of them for us, and what "equal" means.

A pair compares one function of ours with one of a peer on the same batches: the value and, for
losses, the gradient with respect to the current log-probs. Where the two differ on purpose, a
`Deviation` says how, on which batches, and gives in a formula what the peer computes there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from simlab.core.aggregate import AGGREGATIONS, mean
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import bind

TOL = 1e-9  # largest relative error of a value and of a gradient, in the maximum norm
SEQ = "seq_mean_token_mean"
HORIZON = 7  # of seq_mean_token_sum_norm, and the longest row of every batch


# ---------------------------------------------------------------- batches
@dataclass(frozen=True, eq=False)
class Padded:
    """Rows of tokens `[B, T]`; nats, reward units. Behind the mask stands finite junk."""

    lp: Tensor  # the leaf that gradients are taken with respect to
    mu: Tensor
    prox: Tensor
    ref: Tensor
    A: Tensor
    mask: Tensor
    order: Tensor  # [B * T], a permutation: our batches are flat and in no order

    @property
    def rows(self) -> int:
        """B."""
        return self.mask.shape[0]

    def flat(self, prox: Tensor | None = None, **more: Tensor) -> TokenBatch:
        """Our record of the same tokens: one axis, shuffled, the row as response."""
        row = torch.arange(self.rows).unsqueeze(1).expand_as(self.mask)

        def take(x):
            return x.reshape(-1)[self.order]

        return TokenBatch(
            logp=take(self.lp),
            logp_mu=take(self.mu),
            advantage=take(self.A),
            mask=take(self.mask),
            response=take(row),
            logp_prox=take(self.prox if prox is None else prox),
            uniform=torch.arange(self.mask.numel()) / self.mask.numel(),
            n_responses=self.rows,
            **{name: take(x) for name, x in more.items()},
        )


LENGTHS = tuple(1 + 3 * i % HORIZON for i in range(250))  # from 1 to the longest


def draw(seed: int, *, gap=1.0, by_token=False, lengths=LENGTHS) -> Padded:
    """Log-ratios up to 2.5 `gap` nats, many near 0. Advantages per row or by token, some 0."""
    rng = torch.Generator().manual_seed(seed)
    B, T = len(lengths), HORIZON + 1

    def u() -> Tensor:
        return 2 * torch.rand(B, T, generator=rng, dtype=torch.float64) - 1

    mu = -0.05 - 1.5 * (1 + u())
    lp, prox, ref = ((mu + 2.5 * gap * x * x.abs()).clamp(max=-1e-3) for x in (u(), u(), u()))
    A = torch.where(u() < -0.6, 0.0, 2 * u()) if by_token else (2 * u()[:, :1]).repeat(1, T)
    if not by_token:
        A[::10] = 0.0
    mask = torch.arange(T) < torch.tensor(lengths).unsqueeze(1)
    order = torch.randperm(B * T, generator=rng)
    return Padded(lp.requires_grad_(), mu, prox, ref, A, mask, order)


SEEDS = range(4)
BY_ROW = tuple(draw(seed) for seed in SEEDS)
BY_TOKEN = tuple(draw(10 + seed, by_token=True) for seed in SEEDS)
BOTH = BY_ROW + BY_TOKEN
NEAR = tuple(draw(20 + seed, gap=2e-3) for seed in SEEDS)  # some rows inside GSPO's 3e-4
NEAR_BY_TOKEN = tuple(draw(30 + seed, gap=2e-3, by_token=True) for seed in SEEDS)
WIDE = tuple(draw(40 + seed, gap=3.0) for seed in SEEDS)  # KL terms beyond 10
EMPTY_ROW = (draw(50, lengths=(4, 0, 7, 3, 5, 2)),)
NOTHING = (draw(60, lengths=(0, 0, 0)),)


def shifted(*d: float, A: float) -> Padded:
    """One row a token, log-ratio d and advantage A, mu at 0 nats: d is exact."""
    lp = torch.tensor(d, dtype=torch.float64).unsqueeze(1)
    zero = torch.zeros_like(lp)
    mask, order = torch.ones_like(lp, dtype=torch.bool), torch.arange(len(d))
    return Padded(lp.requires_grad_(), zero, zero, zero, torch.full_like(lp, A), mask, order)


# ---------------------------------------------------------------- functions with a name
@dataclass(frozen=True)
class Call:
    """A function of a batch, and the name under which it stands in the table."""

    label: str
    function: Callable

    def __call__(self, x) -> Tensor:
        return self.function(x)


def show(arguments: dict) -> str:
    """`a=1, b=0.5` as a call would be written."""

    def text(x) -> str:
        if isinstance(x, float):
            return re.sub(r"e([+-])0*", lambda m: "e" + m[1].strip("+"), f"{x:g}")
        return repr(x).replace("'", '"')

    return ", ".join(f"{name}={text(value)}" for name, value in arguments.items())


def fold(how: str, S: Tensor, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """(sum, count) of S by one of our aggregations."""
    return AGGREGATIONS[how](
        S, b, **({"horizon": HORIZON} if how == "seq_mean_token_sum_norm" else {})
    )


def ours(name: str, how: str = "token_mean", *, prox: str = "prox", **arguments) -> Call:
    """Minus the aggregated surrogate of a method."""
    method = bind(name, **arguments)

    def loss(x: Padded) -> Tensor:
        b = x.flat(prox=getattr(x, prox))
        S = method.surrogate(b, **method.stats([b])).S
        return -mean(*fold(how, S, b))

    anchor = "" if prox == "prox" else f", `logp_prox` = {prox}"
    return Call(f"`{name}({show(arguments)})`, {how}{anchor}", loss)


# ---------------------------------------------------------------- comparison
class Deviation(NamedTuple):
    """Where a peer computes something else: `instead` is what it computes there."""

    how: str
    batches: tuple
    instead: Callable
    ours: Callable | None = None  # the pair's own when not given
    peer: Callable | None = None


class Pair(NamedTuple):
    """One row of the table. It is equal on `batches`, whatever the deviations say elsewhere."""

    ours: Call
    peer: Call
    paper: str  # which of the two the publication says
    batches: tuple = BOTH
    deviations: tuple[Deviation, ...] = ()
    gradient: bool = True

    @property
    def verdict(self) -> str:
        """ "equal", or how the peer differs."""
        if not self.deviations:
            return "equal"
        told = "differs: " + "; ".join(d.how for d in self.deviations)
        return told + (". Elsewhere equal" if self.batches else "")


def outcome(function: Callable, x) -> list[Tensor]:
    """The value, and the gradient of its sum with respect to `x.lp` where there is one."""
    value = function(x)
    if not value.requires_grad:
        return [value]
    (grad,) = torch.autograd.grad(value.sum(), x.lp)
    return [value.detach(), grad]


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest entry; inf where NaNs stand at other places."""
    if got.shape != want.shape or not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    got, want = got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)
    size, gap = want.abs().max(), (got - want).abs().max()
    return float(gap / size) if size > 0 else (0.0 if gap == 0 else math.inf)


def worst(first: Callable, second: Callable, x, gradient: bool) -> float:
    """The larger relative error of value and gradient."""
    a, b = outcome(first, x), outcome(second, x)
    assert len(a) == len(b) == 1 + gradient, "a loss has a gradient, a statistic has none"
    return max(error(p, q) for p, q in zip(a, b, strict=True))


def check(pair: Pair) -> None:
    """Equality on the ordinary batches; at each deviation a difference, and its formula."""
    assert pair.batches or pair.deviations
    for x in pair.batches:
        assert worst(pair.ours, pair.peer, x, pair.gradient) < TOL
    for d in pair.deviations:
        mine, theirs = d.ours or pair.ours, d.peer or pair.peer
        apart = [worst(mine, theirs, x, pair.gradient) for x in d.batches]
        assert max(apart) > TOL, "the two do not differ where they are said to"
        for x in d.batches:
            assert worst(d.instead, theirs, x, pair.gradient) < TOL, "not as it is said to differ"


def moved(x: Padded, **change: Tensor) -> Padded:
    """x with other fields; the gradient still reaches `x.lp`."""
    return replace(x, **change)
