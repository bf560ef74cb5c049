"""No ratio: S = A log pi, what a trainer does that forgets the data are stale.

Source: REINFORCE, Williams 1992, on whatever was sampled.

Gradient weight on grad log pi: A. Rollout log-probs are not read.
"""

from __future__ import annotations

from simlab.tokens import Surrogate, TokenBatch, on_mask, weighted


def surrogate(b: TokenBatch) -> Surrogate:
    """No hyper-parameters."""
    return weighted(b, on_mask(b, b.advantage), {})
