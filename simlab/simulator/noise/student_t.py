"""iid Student-t noise on every logit: `scale` (nats) times a t variate with `df` degrees of freedom.

Heavy tails: for df > 2 the variance is scale^2 df/(df-2), and E d^2 is that times (1 - sum p^2).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from simlab.simulator.rng import Generators


def logits(z: Tensor, rng: Generators, *, scale: float = 0.05, df: float = 3.0) -> Tensor:
    """z `[L, P, T, M, V]` + scale * t(df). Raises ValueError unless scale >= 0 and df > 0."""
    if not (0 <= scale < float("inf") and df > 0):
        raise ValueError(f"student_t: needs scale >= 0, finite, and df > 0, got {scale}, {df}")
    return z + scale * rng.each(
        lambda generator: generator.standard_t(df, z.shape[1:]).astype(np.float32)
    )
