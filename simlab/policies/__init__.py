"""Policies by name: `init(rng, *, states, features, vocab) -> arrays` of one seed, `logits(w, X)`."""

from __future__ import annotations

from types import ModuleType

from simlab.policies import linear, moe, tabular

POLICIES: dict[str, ModuleType] = {
    "linear": linear,
    "moe": moe,
    "tabular": tabular,
}
