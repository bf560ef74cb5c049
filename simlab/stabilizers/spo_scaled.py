"""SPO-scaled: S = A log pi for A > 0, alpha A log pi for A < 0.

Source: the fixed-scale baseline of ASymPO's paper (2606.03070). Not Simple Policy Optimization, `spo`.

No rollout log-prob is read. alpha has no published value, so it must be given.

Gradient weight on grad log pi: A, or alpha A for A < 0.
"""

from __future__ import annotations

import torch

from simlab.tokens import Surrogate, TokenBatch, on_mask, weighted


def surrogate(b: TokenBatch, *, alpha: float) -> Surrogate:
    """alpha in (0, 1]. Raises ValueError otherwise."""
    if not 0 < alpha <= 1:
        raise ValueError(f"spo_scaled: alpha must lie in (0, 1], got {alpha}")
    A = on_mask(b, b.advantage)
    return weighted(b, torch.where(A < 0, alpha * A, A), {})
