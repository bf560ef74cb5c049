"""needle: every token must be right; reward 1 iff none was wrong. Sparse, no recovery (M = 2)."""

from __future__ import annotations

import numpy as np

from simlab.simulator.tasks.world import World, make_world, pretrained


def states(T: int, V: int) -> int:
    """Right so far, or not."""
    return 2


def build(rng: np.random.Generator, *, P: int, T: int, V: int) -> World:
    """One world; state 1 is "all right so far", state 0 absorbs."""
    right = np.repeat(rng.integers(V, size=(P, T, 1)), 2, axis=2)
    hit = right[..., None] == np.arange(V)
    next_state = np.where(hit, np.arange(2)[:, None], 0)
    reward = np.tile([0.0, 1.0], (P, 1))
    return make_world(next_state, reward, 1, pretrained(rng, right, V))
