"""VCPO: S = sg[w] (A - b) log pi, w = min(prod_t r_t, cap) of the response; the learning rate follows ESS.

Source: "Stable Asynchrony" (2602.17616), official code (cap 8, rule sqrt, base 1).

Over the B responses of the whole batch, ESS = (sum w)^2 / (sum w^2 + 1e-8), and the learning rate of
this step is multiplied by

    lr_factor = min(1, (ESS / B) / base)^(1/2)        (rule "linear": without the root)

which the caller applies and takes back (core/state.py, scale_update). The baseline is the one of least
variance, b = sum W A / sum W (0 without `baseline`) with W = |g|^2 w^2; |g|^2, the squared gradient norm of a response,
is taken as its length T, since the exact norm needs a backward pass a response.

Gradient weight on grad log pi: w (A - b).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.per_response import response_lengths, response_sums, to_tokens
from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import (
    Diagnostic,
    Surrogate,
    TokenBatch,
    log_ratio,
    on_mask,
    ratio,
    weighted,
)
from simlab.stabilizers.parts import Above0

POWER = {"sqrt": 0.5, "linear": 1.0}


def weight(b: TokenBatch, cap: float) -> Tensor:
    """w of each response `[..., n_responses]`."""
    return ratio(response_sums(b, log_ratio(b).detach())).clamp(max=cap)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    cap: Above0 = 8.0,
    base: Annotated[float, Interval("(0, inf)")] = 1.0,
    rule: Literal["sqrt", "linear"] = "sqrt",
    baseline: bool = True,
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"lr_factor", "shift"}, each `[...]`; 1 and 0 without responses."""
    sums = []
    for b in batches:
        T = response_lengths(b)
        A = response_sums(b, on_mask(b, b.advantage)).double() / T.clamp(min=1)
        w = torch.where(T > 0, weight(b, cap).double(), 0)
        parts = (w, w**2, (T > 0).double(), T * w**2 * A, T * w**2)
        sums.append(torch.stack([x.sum(-1) for x in parts]))
    w, w2, B, top, bottom = summed(sums, reduce)
    ess = w**2 / (w2 + 1e-8) / B.clamp(min=1)
    factor = torch.where(B > 0, (ess / base).clamp(max=1) ** POWER[rule], 1)
    best = top / torch.where(bottom > 0, bottom, 1)
    return {"lr_factor": factor, "shift": best if baseline else torch.zeros_like(best)}


def surrogate(
    b: TokenBatch, *, lr_factor: Tensor | float, shift: Tensor | float, cap: Above0 = 8.0
) -> Surrogate:
    """VCPO given `lr_factor` (reported, applied by the caller) and the baseline b as `shift`, each `[...]`."""
    w = to_tokens(b, weight(b, cap))
    lr_factor, shift = (
        torch.as_tensor(x, dtype=w.dtype, device=w.device).unsqueeze(-1) for x in (lr_factor, shift)
    )
    w = torch.where(b.mask, w * (on_mask(b, b.advantage) - shift), 0.0)
    shown = {"lr_factor": Diagnostic(lr_factor, "min"), "baseline": Diagnostic(shift, "max")}
    return weighted(b, w, shown)
