"""SIS: S = sg[w] A log pi, w = 1 with probability min(1, r / lam) and r otherwise, r = pi/mu.

Source: selective importance sampling (2607.04728), read second-hand: from notes and a reproduction.

A token that rejection sampling at level lam would accept passes for a draw of pi and needs no weight; the others keep
the ordinary ratio. An older note drops them (`rejected="drop"`). No value of lam was read. A token is
accepted where its `uniform` lies below min(1, r / lam).

Gradient weight on grad log pi: A or r A.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from simlab.core.arguments import Interval
from simlab.core.tokens import (
    Diagnostic,
    Surrogate,
    TokenBatch,
    log_ratio,
    on_mask,
    ratio,
    weighted,
)


def surrogate(
    b: TokenBatch,
    *,
    lam: Annotated[float, Interval("(0, inf)")] = 1.0,
    rejected: Literal["ratio", "drop"] = "ratio",
) -> Surrogate:
    """Needs `uniform`."""
    r = ratio(log_ratio(b).detach())
    accepted = b.need("uniform", "sis") < r / lam
    w = torch.where(accepted, 1.0, r if rejected == "ratio" else 0.0)
    shown = {"accepted": Diagnostic(accepted, "mean")}
    return weighted(b, w * on_mask(b, b.advantage), shown)
