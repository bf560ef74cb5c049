"""Attack a claim: random instances, then a simplex search from the worst of them. Seeded, budgeted.

A claim is a module of theory/claims with
    NUMBER, TITLE, STATEMENT
    SHAPES               settings to try, each a dict of small numbers
    size(shape)          length of the real vector that describes an instance
    decode(shape, x)     that instance, a dict of arrays and numbers (JSON-able)
    sides(instance)      a list of Side: lhs <= rhs, or lhs = rhs
    tight()              a known extreme instance, the side's name, and its lhs / rhs
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

TOLERANCE = 1e-9, 1e-12  # relative and absolute; float64 sums over at most a few thousand terms


class Side(NamedTuple):
    """One inequality or identity at one instance."""

    name: str
    lhs: float
    rhs: float
    equal: bool = False

    @property
    def violated(self) -> bool:
        """Beyond rounding; a NaN on either side is a violation."""
        if self.lhs == self.rhs:  # infinities too
            return False
        gap = self.lhs - self.rhs
        allowed = TOLERANCE[0] * abs(self.rhs) + TOLERANCE[1]
        return not (abs(gap) if self.equal else gap) <= allowed

    @property
    def ratio(self) -> float:
        """lhs / rhs of an inequality: 1 is tight. 0 for identities and where rhs <= 1e-9."""
        return float(self.lhs / self.rhs) if not self.equal and self.rhs > 1e-9 else 0.0


@dataclass
class Found:
    """What the attack on a claim came to."""

    claim: int
    title: str
    tried: int = 0
    violations: int = 0
    largest: dict[str, float] = field(default_factory=dict)  # side -> largest lhs / rhs
    where: dict[str, dict] = field(default_factory=dict)  # side -> shape of that instance
    worst_error: float = 0.0  # of the identities, absolute
    counterexample: dict | None = None


def attack(claim: ModuleType, tries: int, seed: int = 0) -> Found:
    """The tight example, `tries` random instances, then simplex searches from the worst of each side:
    `tries` steps from the worst shape, an eighth of that from the worst instance of every other."""
    rng = np.random.default_rng([seed, claim.NUMBER])
    found = Found(claim.NUMBER, claim.TITLE)

    def look(instance: dict, where: dict) -> dict[str, float]:
        """Ratios of the inequalities at an instance, after the book is kept."""
        found.tried += 1
        ratios = {}
        for side in claim.sides(instance):
            if side.violated:
                found.violations += 1
                found.counterexample = found.counterexample or as_json(instance)
            if side.equal:
                found.worst_error = max(found.worst_error, abs(side.lhs - side.rhs))
                continue
            ratios[side.name] = side.ratio
            if side.ratio > found.largest.get(side.name, -1.0):
                found.largest[side.name], found.where[side.name] = side.ratio, where
        return ratios

    look(claim.tight()[0], {"tight": "example"})
    worst: dict[str, dict[int, tuple[float, np.ndarray]]] = {}
    for i in range(max(tries, len(claim.SHAPES))):
        at = i % len(claim.SHAPES)
        shape = claim.SHAPES[at]
        x = rng.standard_normal(claim.size(shape)) * np.exp(rng.uniform(-2, 1.5))
        for name, ratio in look(claim.decode(shape, x), shape).items():
            starts = worst.setdefault(name, {})
            if ratio > starts.get(at, (-1.0, x))[0]:
                starts[at] = ratio, x
    for name, starts in worst.items():
        order = sorted(starts, key=lambda at: -starts[at][0])
        for at in order:
            shape = claim.SHAPES[at]

            def objective(y: np.ndarray, name=name, shape=shape) -> float:
                return -look(claim.decode(shape, y), shape).get(name, 0.0)

            steps = tries if at == order[0] else tries // 8 + 1
            options = {"maxfev": steps, "adaptive": True}
            minimize(objective, starts[at][1], method="Nelder-Mead", options=options)
    return found


def as_json(instance: dict) -> dict:
    """Plain lists and numbers."""
    return json.loads(json.dumps(instance, default=lambda x: np.asarray(x).tolist()))


def read_instance(path: Path) -> dict:
    """An instance from a JSON file, arrays restored. Raises ValueError in one sentence."""
    try:
        data = json.loads(path.read_text())
        return {k: _arrays(v) for k, v in data.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: is not an instance ({error})") from error


def _arrays(value):
    if not isinstance(value, list):
        return value
    ragged = len({np.shape(v) for v in value}) > 1 or (value and np.ndim(value[0]) == 2)
    return [np.array(v, float) for v in value] if ragged else np.array(value, float)
