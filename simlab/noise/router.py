"""Gaussian noise of standard deviation `scale` on router logits: now and then another expert answers.

Most states barely move; where two experts are close the whole distribution changes. Heavy tails from
a light-tailed cause. Needs a policy with a router (moe).
"""

from __future__ import annotations

from torch import Tensor

from simlab.draws import Draws


def router(g: Tensor, draws: Draws, *, scale: float = 0.05) -> Tensor:
    """g `[L, S, experts]` + scale * normal."""
    return g + scale * draws.normal(*g.shape[1:])
