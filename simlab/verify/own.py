"""A claim of a user's file, for `simlab verify --claim-file`: docs/claims.md says what such a file holds."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from simlab.core.user_files import module_of, problem
from simlab.verify.claims import CLAIMS
from simlab.verify.formulas import mathml
from theory.search import Claim, Side, as_json

NAMES = {"NUMBER": int, "TITLE": str, "STATEMENT": str, "SHAPES": list}
FUNCTIONS = ("size", "decode", "sides", "tight")


def load(path: Path) -> Claim:
    """The claim of a file, tried once on every shape. Raises ValueError in one sentence that names the file,
    and the line where a function of it failed."""
    try:
        module = module_of(path, f"{__package__}.own")
    except ValueError as error:
        if error.__cause__ is None or not (line := _line(error.__cause__, path)):
            raise
        raise ValueError(f"{path}:{line}: {problem(error.__cause__)}") from error
    for name, kind in NAMES.items():
        if not isinstance(getattr(module, name, None), kind):
            raise ValueError(
                f"{path}: {name} must be {'an' if kind is int else 'a'} {kind.__name__}"
            )
    for name in FUNCTIONS:
        if not callable(getattr(module, name, None)):
            raise ValueError(f"{path}: has no function {name}")
    if module.NUMBER in CLAIMS or module.NUMBER == 12:
        raise ValueError(f"{path}: NUMBER {module.NUMBER} is taken, choose another such as 100")
    try:
        mathml(module.STATEMENT)
    except ValueError as error:
        raise ValueError(f"{path}: STATEMENT {error}") from error
    functions = {name: _guarded(path, getattr(module, name)) for name in FUNCTIONS}
    claim = SimpleNamespace(
        **{name: getattr(module, name) for name in NAMES}, **functions, __doc__=module.__doc__ or ""
    )
    _try(path, claim)
    return claim


def _try(path: Path, claim) -> None:
    """Every shape once, and the known extreme instances."""
    if not claim.SHAPES or not all(isinstance(shape, dict) for shape in claim.SHAPES):
        raise ValueError(f"{path}: SHAPES must hold a dict of settings or more, such as {{'V': 3}}")
    for shape in claim.SHAPES:
        n = claim.size(shape)
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"{path}: size({shape}) is {n!r}, not a number of entries")
        instance = claim.decode(shape, np.zeros(n))
        if not isinstance(instance, dict):
            raise ValueError(f"{path}: decode({shape}, x) gives no dict of arrays and numbers")
        try:
            as_json(instance)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: decode gives what JSON cannot hold ({problem(error)})"
            ) from error
        _sides(path, claim, instance)
    for instance, name, ratio in claim.tight():
        own = {side.name: side.ratio for side in _sides(path, claim, instance)}
        if name not in own:
            raise ValueError(f"{path}: tight names the side {name!r}, there are {', '.join(own)}")
        if not abs(own[name] - ratio) <= 1e-3:
            raise ValueError(
                f"{path}: tight says {ratio} for {name!r}, where it is {own[name]:.6g}"
            )


def _sides(path: Path, claim, instance: dict) -> list[Side]:
    found = claim.sides(instance)
    if not isinstance(found, list) or not found or not all(isinstance(x, Side) for x in found):
        raise ValueError(f"{path}: sides gives no list of theory.search.Side")
    return found


def _guarded(path: Path, function: Callable) -> Callable:
    """The function, whose errors name the file and the line."""

    def call(*arguments):
        try:
            return function(*arguments)
        except Exception as error:  # whatever a user's code may raise
            where = f"{path}:{_line(error, path) or '?'}"
            raise ValueError(f"{where}: {function.__name__} failed ({problem(error)})") from error

    return call


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of the file that an error came through, or that Python could not read."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
    return own[-1] if own else None
