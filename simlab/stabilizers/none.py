"""No ratio at all: S = A log pi. What a trainer does that forgets the data are stale.

Gradient weight on grad log pi: A. Rollout log-probs are not read.
"""

from __future__ import annotations

from simlab.tokens import Surrogate, TokenBatch, on_mask


def surrogate(b: TokenBatch) -> Surrogate:
    """REINFORCE on whatever was sampled (Williams 1992); no hyper-parameters."""
    A = on_mask(b, b.advantage)
    return Surrogate(A * on_mask(b, b.logp), A != 0, {})
