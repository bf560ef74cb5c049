"""SPO: S = r A - |A| / (2 eps) (r - 1)^2, r = pi/mu.

Source: Simple Policy Optimization, Xie et al. (2401.16025); SAT (48); 12.5 in DRPO's comparison.

No clip: a quadratic penalty on the ratio, stationary at r = 1 + sign(A) eps. Beyond that point the
gradient pulls back, and grows with r^2; log-ratios are held at 35 so that it stays finite.

Gradient weight on grad log pi: r (A - |A| (r - 1) / eps).
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
)
from simlab.stabilizers.contraction import LEAST
from simlab.stabilizers.parts import Above0


def surrogate(b: TokenBatch, *, eps: Above0 = 0.2, shrink: Tensor | None = None) -> Surrogate:
    """eps is the distance of the stationary ratio from 1; `shrink` `[..., N]` multiplies it (`+contract`)."""
    radius = eps if shrink is None else eps * shrink.clamp(min=LEAST)
    d, A = log_ratio(b), on_mask(b, b.advantage)
    with torch.no_grad():
        r = d.clamp(max=LOG_RATIO_CAP / 2).exp()
        held = d > LOG_RATIO_CAP / 2
        S = r * A - A.abs() / (2 * radius) * (r - 1) ** 2
        w = torch.where(held, 0.0, r * (A - A.abs() * (r - 1) / radius))
    reversed_ = Diagnostic(lambda: w * A < 0, "mean")
    return Surrogate(
        graded(d, S, w), w != 0, {"held": Diagnostic(held, "mean"), "reversed": reversed_}
    )
