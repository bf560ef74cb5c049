"""VACO filter: S = r A, but 0 if A (r - 1) > 0 while the batch's TV estimate exceeds delta, r = pi/mu.

Source: VACO (2603.01365), from reviews; the per-response variant from open-instruct.

The estimate is D = (1/2) mean |r - 1| over the active tokens of the whole batch; once D > delta, the
tokens whose gradient would increase it are dropped. `scope="response"` takes D over each response.
The paper's V-trace advantages are not part of this.

Gradient weight on grad log pi: r A, 0 on dropped tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Literal

import torch
from torch import Tensor

from simlab.core.per_response import response_means
from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio
from simlab.stabilizers.parts import AtLeast0, clipped


def distance(b: TokenBatch) -> Tensor:
    """|r - 1| / 2 `[..., N]`, 0 where masked."""
    return (ratio(log_ratio(b).detach()) - 1).abs() / 2


def whole_batch(
    batches: Iterable[TokenBatch], *, reduce: Reduce | None = None
) -> dict[str, Tensor]:
    """{"D": `[...]`}, half the mean of |r - 1| over micro-batches and, through `reduce`, ranks."""
    batches = list(batches)
    total = summed((distance(b).double().sum(-1) for b in batches), reduce)
    n = summed((b.mask.sum(-1) for b in batches), reduce)
    return {"D": total / n.clamp(min=1)}


def surrogate(
    b: TokenBatch,
    *,
    D: Tensor | float,
    delta: AtLeast0 = 0.2,
    scope: Literal["batch", "response"] = "batch",
) -> Surrogate:
    """The filter given D `[...]`."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    D = torch.as_tensor(D, device=d.device).unsqueeze(-1)
    far = (response_means(b, distance(b)) if scope == "response" else D) > delta
    dropped = far & (A * d.detach() > 0)
    S, active, shares = clipped(d, A, 0, inf, (~dropped).to(d.dtype))
    shown = {"dropped": Diagnostic(dropped, "mean"), "D": Diagnostic(D, "max")}
    return Surrogate(S, active, shown | {"overflow": shares["overflow"]})
