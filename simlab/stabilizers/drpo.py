"""DRPO: S = r A - |A| / (2 delta) m (r - 1)^2, m = mu(token), r = pi/mu.

Source: "Rethinking the divergence regularization in LLM RL" (2606.09821), official code; SAT (49).

No clip: a quadratic penalty on |pi - mu|, stationary at pi = m + sign(A) delta. The paper's runs quote
12.5 for the threshold, which leaves the weight within 8 % of r A; a delta of .2 would be DPPO's.

Gradient weight on grad log pi: r (A - |A| (pi - m) / delta).
"""

from __future__ import annotations

import torch

from simlab.tokens import (
    D_MAX,
    Diagnostic,
    Surrogate,
    TokenBatch,
    graded,
    log_ratio,
    on_mask,
    ratio,
)


def surrogate(b: TokenBatch, *, delta: float = 12.5) -> Surrogate:
    """Raises ValueError unless delta > 0."""
    if not delta > 0:
        raise ValueError(f"drpo: delta must be above 0, got {delta}")
    d, A = log_ratio(b), on_mask(b, b.advantage)
    with torch.no_grad():
        r, gap = ratio(d), on_mask(b, b.logp).exp() - on_mask(b, b.logp_mu).exp()
        overflow = d > D_MAX
        S = r * A - A.abs() / (2 * delta) * gap * (r - 1)
        w = torch.where(overflow, 0.0, r * (A - A.abs() * gap / delta))
    reversed_ = Diagnostic(lambda: w * A < 0, "mean")
    shown = {"overflow": Diagnostic(overflow, "mean"), "reversed": reversed_}
    return Surrogate(graded(d, S, w), w != 0, shown)
