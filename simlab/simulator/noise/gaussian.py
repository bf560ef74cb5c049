"""iid Gaussian noise of standard deviation `scale` (nats) on every logit of the engine.

To first order E d^2 = scale^2 (1 - sum p^2) at a state with probabilities p (formulas: ESTR).
"""

from __future__ import annotations

from torch import Tensor

from simlab.simulator.rng import Generators


def logits(z: Tensor, rng: Generators, *, scale: float = 0.05) -> Tensor:
    """z `[L, P, T, M, V]` + scale * normal. Raises ValueError unless scale >= 0."""
    if not 0 <= scale < float("inf"):
        raise ValueError(f"gaussian: scale must be at least 0 and finite, got {scale}")
    return z + scale * rng.normal(*z.shape[1:])
