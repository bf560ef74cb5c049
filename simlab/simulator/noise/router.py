"""Gaussian noise of standard deviation `scale` on router logits: now and then another expert answers.

Most states barely move; where two experts are close the whole distribution changes. Heavy tails from
a light-tailed cause. Needs a policy with a router (moe).
"""

from __future__ import annotations

from torch import Tensor

from simlab.simulator.rng import Generators


def router(g: Tensor, rng: Generators, *, scale: float = 0.05) -> Tensor:
    """g `[L, S, experts]` + scale * normal. Raises ValueError unless scale >= 0."""
    if not 0 <= scale < float("inf"):
        raise ValueError(f"router: scale must be at least 0 and finite, got {scale}")
    return g + scale * rng.normal(*g.shape[1:])
