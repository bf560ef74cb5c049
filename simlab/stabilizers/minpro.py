"""MinPRO: S = min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), rho = r_t times the smallest r before t, r = pi/mu.

Source: 2601.22718, second-hand: from its abstract and notes; the exact form, the clip and `held` were not read.

One factor stands in for the product over the prefix, which has too much variance. Before the first token the smallest is
1; with `held` it is at most 1 everywhere. The gradient of rho goes through the token's own log-prob.

Gradient weight on grad log pi: rho A, 0 where the clip binds.
"""

from __future__ import annotations

import torch

from simlab.core.in_order import InOrder
from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import RadiusHigh, RadiusLow, clipped


def surrogate(
    b: TokenBatch,
    *,
    held: bool = False,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Needs `position`."""
    d = log_ratio(b)
    least = InOrder(b, "minpro").smallest_before(d)
    least = torch.where(least == torch.inf, 0.0, least)
    least = least.clamp(max=0) if held else least
    return clipped(d + least, on_mask(b, b.advantage), 1 - eps_low, 1 + eps_high)
