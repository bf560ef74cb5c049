"""One or two settings over several values: a regime map is a comparison at every point of a sweep.

    training.lr=0.5,1,2,4          a setting of the world or of the training
    sat.alpha=0.8,0.9              an argument of the arm with that label
    gaussian.scale=0,0.05          an argument of that noise model

A point is an ordinary comparison: a cell that two points share is run once.
"""

from __future__ import annotations

from itertools import product

from simlab.study.specs import literal, parse

Values = tuple[object, ...]
SECTIONS = ("training", "world")
LARGEST = 64  # values of an axis


def axis(text: str) -> tuple[str, Values]:
    """(name, values) of `name=value,value,...`. Raises ValueError in one sentence."""
    name, equals, rest = text.partition("=")
    owner, dot, key = name.partition(".")
    words = rest.split(",")
    if not (owner and dot and key and equals and all(words)):
        raise ValueError(f"{text!r} is not name=value,value,... such as training.lr=0.5,1,2")
    values = [literal(word) for word in words]
    numbers = [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]
    if any(isinstance(x, float) for x in numbers) and len(numbers) == len(values):
        values = [float(x) for x in numbers]
    if len({type(x) for x in values}) > 1:
        raise ValueError(f"{text!r}: values of one axis are all numbers or all words")
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r}: a value is given twice")
    if len(values) > LARGEST:
        raise ValueError(f"{name}: {len(values)} values, at most {LARGEST} make an axis")
    return name, tuple(values)


def axes(sweep: tuple[str, ...]) -> dict[str, Values]:
    """The axes by name, two at most. Raises ValueError in one sentence."""
    found = dict(map(axis, sweep))
    if len(found) < len(sweep):
        raise ValueError(f"an axis is given twice ({', '.join(sweep)})")
    if len(found) > 2:
        raise ValueError(f"a sweep has two axes at most ({', '.join(sweep)})")
    return found


def points(sweep: tuple[str, ...], settings: dict) -> list[tuple[dict[str, object], dict]]:
    """Every point, the last axis fastest, with the settings there; `settings` are as `model_dump` gives them.

    Raises ValueError in one sentence for a name that is no setting, arm or noise model.
    """
    named = axes(sweep)
    out = []
    for values in product(*named.values()):
        point, there = dict(zip(named, values, strict=True)), dict(settings)
        for name, value in point.items():
            _put(there, name, value)
        out.append((point, there))
    return out


def _put(settings: dict, name: str, value: object) -> None:
    """Write the value where the name says, into settings as `model_dump` gives them."""
    owner, _, key = name.partition(".")
    if owner in SECTIONS:
        if key not in settings[owner]:
            raise ValueError(f"{name}: there is no such setting; there are {_all(settings[owner])}")
        settings[owner] = settings[owner] | {key: value}
        return
    for where in ("methods", "noise"):
        labels = [parse(spec)[0] for spec in settings[where]]
        names = [parse(spec)[1] for spec in settings[where]]
        labels = labels if where == "methods" else names
        if owner in labels:
            spec = settings[where][labels.index(owner)]
            given = spec if where == "noise" or "=" in spec.split(":")[0] else f"{owner}={spec}"
            joint = "," if ":" in spec else ":"
            changed = f"{given}{joint}{key}={value}"
            settings[where] = tuple(
                changed if label == owner else one
                for label, one in zip(labels, settings[where], strict=True)
            )
            return
    arms = [parse(spec)[0] for spec in settings["methods"]]
    raise ValueError(
        f"{name}: {owner!r} is no section ({_all(SECTIONS)}), arm ({_all(arms)}) or noise model"
    )


def _all(names) -> str:
    return ", ".join(names)
