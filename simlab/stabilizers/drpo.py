"""DRPO: S = r A - |A| / (2 delta) m (r - 1)^2, m = mu(token), r = pi/mu.

Source: "Rethinking the divergence regularization in LLM RL" (2606.09821), official code; SAT (49).

No clip: a quadratic penalty on |pi - mu|, stationary at pi = m + sign(A) delta. The paper's runs quote
12.5 for the threshold, which leaves the weight within 8 % of r A; a delta of 0.2 would be DPPO's.

Gradient weight on grad log pi: r (A - |A| (pi - m) / delta).
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.core.tokens import (
    LOG_RATIO_CAP,
    Diagnostic,
    Surrogate,
    TokenBatch,
    graded,
    log_ratio,
    on_mask,
    ratio,
)
from simlab.stabilizers.contraction import LEAST
from simlab.stabilizers.parts import Above0


def surrogate(b: TokenBatch, *, delta: Above0 = 12.5, shrink: Tensor | None = None) -> Surrogate:
    """delta in units of probability; `shrink` `[..., N]` multiplies it (`+contract`)."""
    radius = delta if shrink is None else delta * shrink.clamp(min=LEAST)
    d, A = log_ratio(b), on_mask(b, b.advantage)
    with torch.no_grad():
        r, gap = ratio(d), on_mask(b, b.logp).exp() - on_mask(b, b.logp_mu).exp()
        overflow = d > LOG_RATIO_CAP
        S = r * A - A.abs() / (2 * radius) * gap * (r - 1)
        w = torch.where(overflow, 0.0, r * (A - A.abs() * gap / radius))
    reversed_ = Diagnostic(lambda: w * A < 0, "mean")
    shown = {"overflow": Diagnostic(overflow, "mean"), "reversed": reversed_}
    return Surrogate(graded(d, S, w), w != 0, shown)
