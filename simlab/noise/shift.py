"""The engine is one position off: it answers position t with the logits of position t - 1.

A bug that has been shipped more than once. d is then of the order of the policy itself.
"""

from __future__ import annotations

from torch import Tensor

from simlab.draws import Draws


def logits(z: Tensor, draws: Draws, *, by: int = 1) -> Tensor:
    """z `[L, P, T, M, V]` rolled along T."""
    return z.roll(by, dims=2)
