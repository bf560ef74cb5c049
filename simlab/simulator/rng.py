"""Every random number of the simulator: one generator per seed, purpose and moment.

Seed s gives the same world, features, first weights and sampling uniforms to every method and lag:
runs are paired, and adding a seed, a method or a lag changes nothing that was there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

WORLD, INIT, SAMPLE, NOISE, GATE = range(5)


class Generators:
    """Random tensors [L, ...], lane i from `default_rng([seeds[i], *key])`."""

    def __init__(self, seeds: Sequence[int], *key: int):
        self.generators = [np.random.default_rng([seed, *key]) for seed in seeds]

    def uniform(self, *shape: int) -> Tensor:
        """float64 in [0, 1)."""
        return self.each(lambda rng: rng.random(shape))

    def normal(self, *shape: int) -> Tensor:
        """float32, standard."""
        return self.each(lambda rng: rng.standard_normal(shape, dtype=np.float32))

    def each(self, draw) -> Tensor:
        """Stack `draw(generator)` over lanes."""
        return torch.from_numpy(np.stack([draw(rng) for rng in self.generators]))
