"""No ratio: S = A log pi, what a trainer does that forgets the data are stale.

Source: REINFORCE, Williams 1992, on whatever was sampled.

Gradient weight on grad log pi: A. Rollout log-probs are not read.
"""

from __future__ import annotations

from torch import Tensor

from simlab.core.tokens import Surrogate, TokenBatch, on_mask, weighted


def surrogate(b: TokenBatch, *, W: Tensor | None = None) -> Surrogate:
    """No hyper-parameters. W `[..., N]` multiplies S."""
    A = on_mask(b, b.advantage)
    return weighted(b, A if W is None else W * A, {})
