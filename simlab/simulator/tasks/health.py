"""health: a right token heals, a wrong one hurts, zero is death; reward 1 iff alive at the end.

M = 3 levels, start at the top. Mistakes can be repaired, a policy that degrades shows as collapse.
"""

from __future__ import annotations

import numpy as np

from simlab.simulator.tasks.world import World, make_world, pretrained

M = 3


def states(T: int, V: int) -> int:
    """Three levels of health."""
    return M


def build(rng: np.random.Generator, *, P: int, T: int, V: int) -> World:
    """One world; the right token is drawn for every state (p, t, m)."""
    right = rng.integers(V, size=(P, T, M))
    level = np.arange(M)[:, None]
    hit = right[..., None] == np.arange(V)
    next_state = np.where(hit, np.minimum(level + 1, M - 1), level - 1)
    next_state = np.where(level == 0, 0, next_state)
    reward = np.tile(np.arange(M) > 0, (P, 1))
    return make_world(next_state, reward, M - 1, pretrained(rng, right, V))
