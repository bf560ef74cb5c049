"""Attack a claim: random instances, then a simplex search from the worst of them. Seeded, budgeted."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

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


class Claim(Protocol):
    """What a module of theory/claims defines; statement, assumptions and proof are its docstring."""

    NUMBER: int
    TITLE: str
    STATEMENT: str  # a sentence with its formulas as LaTeX between dollars
    SHAPES: list[dict]  # settings to try, small numbers each

    def size(self, shape: dict) -> int:
        """Length of the real vector that describes an instance."""
        ...

    def decode(self, shape: dict, x: np.ndarray) -> dict:
        """That instance: arrays and numbers, which JSON can hold."""
        ...

    def sides(self, instance: dict) -> list[Side]:
        """Its inequalities and identities: lhs <= rhs, or lhs = rhs."""
        ...

    def tight(self) -> list[tuple[dict, str, float]]:
        """Known extreme instances, each with the name of a side and its lhs / rhs there (to 1e-3).
        Where a constant depends on a size, such as T, there is one for several sizes."""
        ...


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


class _Violated(Exception):
    """Ends an attack that was to end at the first violation."""


def attack(claim: Claim, tries: int, seed: int = 0, first: bool = False) -> Found:
    """The tight examples, `tries` random instances, then simplex searches from the worst of each side:
    `tries` steps from the worst shape, an eighth of that from the worst instance of every other.
    `first` ends it at the first violation."""
    record = Found(claim.NUMBER, claim.TITLE)
    with suppress(_Violated):
        _attack(claim, tries, np.random.default_rng([seed, claim.NUMBER]), record, first)
    return record


def _attack(claim: Claim, tries: int, rng: np.random.Generator, record: Found, first: bool) -> None:

    def look(instance: dict, where: dict) -> dict[str, float]:
        """Record an instance and return the ratios of its inequalities."""
        record.tried += 1
        ratios = {}
        for side in claim.sides(instance):
            if side.violated:
                record.violations += 1
                record.counterexample = record.counterexample or as_json(instance)
                if first:
                    raise _Violated
            if side.equal:
                record.worst_error = max(record.worst_error, abs(side.lhs - side.rhs))
                continue
            ratios[side.name] = side.ratio
            if side.ratio > record.largest.get(side.name, -1.0):
                record.largest[side.name], record.where[side.name] = side.ratio, where
        return ratios

    for instance, _, _ in claim.tight():
        look(instance, {"tight": "example"})
    worst: dict[str, dict[int, tuple[float, np.ndarray]]] = {}
    for i in range(max(tries, len(claim.SHAPES))):
        shape_index = i % len(claim.SHAPES)
        shape = claim.SHAPES[shape_index]
        x = rng.standard_normal(claim.size(shape)) * np.exp(rng.uniform(-2, 1.5))
        for name, ratio in look(claim.decode(shape, x), shape).items():
            starts = worst.setdefault(name, {})
            if ratio > starts.get(shape_index, (-1.0, x))[0]:
                starts[shape_index] = ratio, x
    for name, starts in worst.items():
        order = sorted(starts, key=lambda shape_index: -starts[shape_index][0])
        for shape_index in order:
            shape = claim.SHAPES[shape_index]

            def objective(y: np.ndarray, name=name, shape=shape) -> float:
                return -look(claim.decode(shape, y), shape).get(name, 0.0)

            steps = tries if shape_index == order[0] else tries // 8 + 1
            options = {"maxfev": steps, "adaptive": True}
            minimize(objective, starts[shape_index][1], method="Nelder-Mead", options=options)


def as_json(instance: dict) -> dict:
    """Plain lists and numbers."""
    return json.loads(json.dumps(instance, default=lambda x: np.asarray(x).tolist()))


def read_instance(path: Path) -> dict:
    """An instance from a JSON file, arrays restored. Raises ValueError in one sentence."""
    try:
        if path.is_char_device():
            raise OSError("it is a device")  # /dev/zero has no end
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it must be an object of named numbers and arrays")
        return {name: _arrays(name, value) for name, value in data.items()}
    except RecursionError as error:
        raise ValueError(f"{path}: is not an instance (nested too deeply)") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: is not an instance ({error})") from error


def _arrays(name: str, value):
    if not isinstance(value, list):
        return value
    try:
        ragged = len({np.shape(v) for v in value}) > 1 or (value and np.ndim(value[0]) == 2)
        return [np.array(v, float) for v in value] if ragged else np.array(value, float)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is no array of numbers") from error


def check_shapes(claim: Claim, instance: dict) -> None:
    """Raises ValueError in one sentence unless the instance has the fields of the claim, of finite
    numbers and of the shapes that the claim's own instances have: lengths that are one number there,
    or those of another field, are so here. Policies are checked where they are read (tables.Pair).
    """
    own = [claim.decode(shape, np.zeros(claim.size(shape))) for shape in claim.SHAPES]
    if instance.keys() != own[0].keys():
        raise ValueError(f"it has {', '.join(instance) or 'nothing'}, not {', '.join(own[0])}")
    lengths: dict[tuple, tuple[str, int]] = {}
    for name, value in instance.items():
        if (one := _kind(value)) != (other := _kind(own[0][name])):
            raise ValueError(f"{name} is {one}, not {other}")
        if not all(np.isfinite(x).all() for x in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name} holds a number that is not finite")
        if isinstance(value, np.ndarray):
            seen = tuple(len(x[name]) for x in own)
            other, length = lengths.setdefault(seen, (name, len(value)))
            length = seen[0] if len(set(seen)) == 1 else length
            if len(value) != length or not length:
                raise ValueError(f"{name} has {len(value)} entries, not {length or 1} as {other}")


def _kind(value) -> str:
    if isinstance(value, list):
        return "a list of matrices"
    if isinstance(value, np.ndarray):
        return f"an array of {value.ndim} dimensions"
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return "a number" if number else f"{value!r}"
