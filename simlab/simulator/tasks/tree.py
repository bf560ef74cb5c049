"""tree: the automaton remembers the whole prefix, the reward is any number in [0, 1] per answer.

M = V**T, so it is for small V and T only: the oracle against which the tests enumerate everything.
"""

from __future__ import annotations

import numpy as np

from simlab.simulator.tasks.world import World, make_world, pretrained


def states(T: int, V: int) -> int:
    """Every prefix."""
    return V**T


def build(rng: np.random.Generator, *, P: int, T: int, V: int) -> World:
    """One world; state m at position t is the prefix read in base V."""
    M = states(T, V)
    child = (np.arange(M)[:, None] * V + np.arange(V)) % M
    next_state = np.broadcast_to(child, (P, T, M, V))
    right = rng.integers(V, size=(P, T, M))
    return make_world(next_state, rng.random((P, M)), 0, pretrained(rng, right, V))
