"""SPO-scaled: S = A log pi for A > 0, alpha A log pi for A < 0.

Source: the fixed-scale baseline of ASymPO's paper (2606.03070). Not Simple Policy Optimization, `spo`.

No rollout log-prob is read. alpha has no published value, so it must be given.

Gradient weight on grad log pi: A, or alpha A for A < 0.
"""

from __future__ import annotations

from typing import Annotated

import torch

from simlab.core.arguments import Interval
from simlab.core.tokens import Surrogate, TokenBatch, on_mask, weighted


def surrogate(b: TokenBatch, *, alpha: Annotated[float, Interval("(0, 1]")]) -> Surrogate:
    """alpha is the share of its weight that a negative token keeps."""
    A = on_mask(b, b.advantage)
    return weighted(b, torch.where(A < 0, alpha * A, A), {})
