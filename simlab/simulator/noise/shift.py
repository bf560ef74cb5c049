"""The engine is one position off: it answers position t with the logits of position t - 1.

A bug that has been shipped more than once. d is then of the order of the policy itself; the first
position, which has nothing before it, is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.simulator.rng import Generators


def logits(z: Tensor, rng: Generators, *, by: int = 1) -> Tensor:
    """z `[L, P, T, M, V]` with position t answered by max(t - by, 0). Raises ValueError for by < 0."""
    if by < 0:
        raise ValueError(f"shift: by must be at least 0, got {by}")
    return z[:, :, (torch.arange(z.shape[2]) - by).clamp(min=0)]
