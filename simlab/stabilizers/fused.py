"""The same loss in one pass: surrogate, aggregate and reduced diagnostics under torch.compile.

There is no second formula. `terms` calls the stabilizer, and `fuse` compiles `terms`: the value, its
gradient weight and every diagnostic come out of one loop over the tokens, and the backward pass is
one more. A compilation takes seconds (and a C++ compiler on a CPU), so this pays from about 1e5
tokens a step on; the simulator, whose batches are small, stays eager. `reports/benchmarks` has both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from simlab.core.aggregate import reduce_diagnostics, token_mean
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import Stabilizer

Aggregate = Callable[[Tensor, TokenBatch], tuple[Tensor, Tensor]]


class Terms(NamedTuple):
    """What a micro-batch adds: sums over micro-batches and ranks give loss = -total / count."""

    total: Tensor  # [...], differentiable
    count: Tensor  # [...] int64
    # only where they are asked for:
    shown: dict[str, Tensor]  # diagnostics reduced over this micro-batch, each [...]
    how: dict[str, str]  # and over micro-batches: "mean" weighted by active tokens, "min" or "max"
    active: Tensor | None  # [..., N] bool, active tokens whose log-prob receives a gradient


def terms(
    stabilizer: Stabilizer, aggregate: Aggregate, show: bool, b: TokenBatch, **stats
) -> Terms:
    """The loss terms of b, given the whole-batch numbers of `stabilizer.stats`."""
    S, active, diagnostics = stabilizer.surrogate(b, **stats)
    total, count = aggregate(S, stabilizer.counted(b))
    if not show:
        return Terms(total, count, {}, {}, None)
    how = {name: x.reduce for name, x in diagnostics.items()}
    active = active.expand(b.mask.shape) & b.mask
    return Terms(total, count, reduce_diagnostics(b, diagnostics), how, active)


def fuse(
    stabilizer: Stabilizer,
    aggregate: Aggregate = token_mean,
    *,
    show: bool = True,
    backend: str = "inductor",
) -> Callable[..., Terms]:
    """`terms` of b and its stats, compiled as one graph: raises rather than break it in two.

    Without `show` neither diagnostics nor `active` are computed (between two steps that are logged).

    A new shape, dtype or number of responses compiles anew once, then sizes are symbols.
    """

    def run(b: TokenBatch, **stats) -> Terms:
        return terms(stabilizer, aggregate, show, b, **stats)

    # Compiled code is kept by code object. One of its own keeps a call from walking through the
    # guards of every other stabilizer, and their shapes from becoming symbols here.
    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True, backend=backend)
