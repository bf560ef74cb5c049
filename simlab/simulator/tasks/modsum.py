"""modsum: each token adds its own random step to a counter mod M; reward 1 iff the target residue.

No token is right by itself and every token matters: credit is spread over the whole answer.
"""

from __future__ import annotations

import numpy as np

from simlab.simulator.tasks.world import World, make_world, pretrained

M = 3


def states(T: int, V: int) -> int:
    """Residues."""
    return M


def build(rng: np.random.Generator, *, P: int, T: int, V: int) -> World:
    """One world; the base policy favours a random token per state."""
    step = rng.integers(M, size=(P, T, 1, V))
    next_state = (np.arange(M)[:, None] + step) % M
    target = rng.integers(M, size=(P, 1))
    favoured = rng.integers(V, size=(P, T, M))
    return make_world(next_state, np.arange(M) == target, 0, pretrained(rng, favoured, V))
