"""Tasks by name: `build(rng, *, P, T, V) -> World` of one seed, `states(T, V)` of its automaton."""

from __future__ import annotations

from types import ModuleType

from simlab.tasks import health, modsum, needle, tree

TASKS: dict[str, ModuleType] = {
    "health": health,
    "modsum": modsum,
    "needle": needle,
    "tree": tree,
}
