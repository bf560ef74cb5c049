"""Tasks by name, each a module of this folder: a token MDP whose reward an automaton decides."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from simlab.simulator.tasks import health, modsum, needle, tree
from simlab.simulator.tasks.world import World


class Task(Protocol):
    """What a module of this folder defines: P prompts, T tokens an answer, V words."""

    def states(self, T: int, V: int) -> int:
        """M, the number of states of the automaton."""
        ...

    def build(self, rng: np.random.Generator, *, P: int, T: int, V: int) -> World:
        """The world of one seed."""
        ...


TASKS: dict[str, Task] = {
    "health": health,
    "modsum": modsum,
    "needle": needle,
    "tree": tree,
}
