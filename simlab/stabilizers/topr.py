"""TOPR: S = sg[w] A log pi, w = 1 for a good response, min(prod_t r_t, 1) on each token of a bad one, r = pi/mu.

Source: tapered off-policy REINFORCE (2503.14286) eq. (8), through the code of ROLL and Trinity; text second-hand.

A bad response that the policy has left is left alone; a good one is never cut. Frameworks differ, so both are
arguments: `sign` calls a response good by its reward > 0 (paper, ROLL) or by the advantage of the token > 0
(Trinity; a solved response can have A < 0); `level` takes the product over the response (paper) or the
token's own ratio (ROLL, Trinity).

Gradient weight on grad log pi: w A.
"""

from __future__ import annotations

from typing import Literal

import torch

from simlab.core.tokens import (
    Diagnostic,
    Surrogate,
    TokenBatch,
    log_ratio,
    on_mask,
    ratio,
    weighted,
)
from simlab.stabilizers.algebra.statistics import reduced
from simlab.stabilizers.parts import Level


def surrogate(
    b: TokenBatch,
    *,
    sign: Literal["reward", "advantage"] = "reward",
    level: Level = "sequence",
) -> Surrogate:
    """Sign "reward" needs `reward`."""
    A, d = on_mask(b, b.advantage), log_ratio(b).detach()
    good = (A if sign == "advantage" else on_mask(b, b.need("reward", "topr"))) > 0
    D = reduced(b, d, "sum" if level == "sequence" else "token")
    w = torch.where(good, 1.0, ratio(D.clamp(max=0)))
    tapered = Diagnostic(lambda: ~good & (w < 0.5), "mean")
    return weighted(b, w * A, {"damped": tapered})
