"""mu-GRPO: S = M min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), M drops what follows a trigger if A < 0, r = pi/mu.

Source: 2605.17570, second-hand: from its abstract and notes; the threshold, its direction and the clip's radii
were not read.

The trigger is the first token of the response with |log r| above log(threshold). For A < 0 the tokens after it have no
gradient: their prefix is one that the policy would hardly write. `include_trigger` drops that token too. The
defaults are a reading, not the paper's.

Gradient weight on grad log pi: r A, 0 where dropped or where the clip binds.
"""

from __future__ import annotations

import math
from typing import Annotated

from simlab.core.arguments import Interval
from simlab.core.in_order import InOrder
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import RadiusHigh, RadiusLow, clipped


def surrogate(
    b: TokenBatch,
    *,
    threshold: Annotated[float, Interval("(1, inf]")] = 4.0,
    include_trigger: bool = True,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Needs `position`."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    out = (d.detach().abs() > math.log(threshold)).to(d.dtype)
    seen = InOrder(b, "mu_grpo").sums(out)
    dropped = (A < 0) & ((seen if include_trigger else seen - out) > 0)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, (~dropped).to(d.dtype))
    return Surrogate(S, active, shares | {"dropped": Diagnostic(dropped, "mean")})
