"""Hyper-parameters of plain functions: which there are, and whether what a user wrote fits them.

A function says it with the annotations of its keyword-only arguments, as text or as types:

    float, int, str, bool, None             and unions of all that stands here
    Literal["token", "sequence"]            one of these words
    Annotated[float, Interval("(0, 1]")]    a number of the interval

An argument annotated in another way (a tensor, a callable) is supplied by the caller of the loss and
is no hyper-parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter, signature
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

PLAIN = {int: int, float: (int, float), str: str, bool: bool, NoneType: NoneType}
SMALLEST, LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38  # of float32, in size


@dataclass(frozen=True)
class Interval:
    """An interval as mathematics writes it: "[0, 1)" holds 0 and not 1, "(0, inf)" every finite
    number above 0, and "(0, inf]" infinity too."""

    text: str

    def __contains__(self, x: float) -> bool:
        low, high = (float(end) for end in self.text[1:-1].split(","))
        above = low < x if self.text[0] == "(" else low <= x
        return above and (x < high if self.text[-1] == ")" else x <= high)


class Kind(NamedTuple):
    """One member of an annotation: a type, and which of its values."""

    type: type
    choices: tuple = ()  # any, if empty
    interval: Interval | None = None

    def fits(self, value) -> bool:
        """Whether the value is of this kind. True and false are no numbers, NaN is in no interval."""
        if isinstance(value, bool) != (self.type is bool) or not isinstance(
            value, PLAIN[self.type]
        ):
            return False
        if self.choices:
            return value in self.choices
        return self.interval is None or value in self.interval

    def __str__(self) -> str:
        if self.choices:
            *others, last = (str(x) for x in self.choices)
            return f"{', '.join(others)} or {last}" if others else last
        name = "None" if self.type is NoneType else self.type.__name__
        if self.interval is None:
            return name
        return f"{'' if self.type is float else name + ' '}in {self.interval.text}"


def describe(kinds: Iterable[Kind]) -> str:
    """What an argument may be, in words: "in (1, inf] or None", "token or sequence"."""
    return " or ".join(map(str, kinds))


def check_name(kind: str, name: str, registry: Iterable[str]) -> None:
    """Raises ValueError, listing what there is, for a name that is not in the registry."""
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(registry)}")


def check_call(who: str, function, *given, **options) -> None:
    """Raises ValueError for an option that function(*given, **options) misses or does not know."""
    try:
        signature(function).bind(*given, **options)
    except TypeError as error:
        raise ValueError(f"{who}: {error}") from None


def call(who: str, function, *given, **options):
    """function(*given, **options), checked."""
    check_call(who, function, *given, **options)
    return function(*given, **options)


def _none_is_a_word(kinds: tuple[Kind, ...]) -> bool:
    return "none" in {x for kind in kinds for x in kind.choices} and not any(
        kind.type is NoneType for kind in kinds
    )


def check_arguments(who: str, known: dict[str, tuple[Kind, ...]], arguments: dict) -> dict:
    """The arguments, the word none for None where it is one of the choices and None is not: a spec writes both
    in one way. `known` is what `settable` returns.

    Raises ValueError in one sentence for an argument that is unknown, or that does not fit its
    annotation, or that float32 cannot hold.
    """
    if unknown := arguments.keys() - known.keys():
        raise ValueError(
            f"{who} has no argument {', '.join(sorted(unknown))}; "
            f"it takes {', '.join(sorted(known)) or 'none'}"
        )
    words = {k for k, x in arguments.items() if x is None and _none_is_a_word(known[k])}
    arguments = arguments | dict.fromkeys(words, "none")
    for key, value in arguments.items():
        fitting = [kind for kind in known[key] if kind.fits(value)]
        if not fitting:
            said = (f"{'lie' if str(x).startswith('in ') else 'be'} {x}" for x in known[key])
            raise ValueError(f"{who}: {key} must {' or '.join(said)}, got {value!r}")
        if any(kind.type is float for kind in fitting) and _beyond_float32(value):
            raise ValueError(
                f"{who}: {key} must be a number that float32 holds, "
                f"0 or {SMALLEST:.1e} to {LARGEST:.1e} in size, got {value!r}"
            )
    return arguments


def _beyond_float32(x: float) -> bool:
    return 0 < abs(x) < SMALLEST or LARGEST < abs(x) < math.inf


def settable(function: Callable) -> dict[str, tuple[Kind, ...]]:
    """The hyper-parameters: keyword-only arguments, with what each may be. Whole-batch numbers are
    annotated as tensors, and the caller supplies them."""
    kinds = {
        p.name: _kinds(_resolved(function, p.annotation))
        for p in signature(function).parameters.values()
        if p.kind == p.KEYWORD_ONLY
    }
    return {name: kind for name, kind in kinds.items() if kind}


def required(function: Callable) -> set[str]:
    """Hyper-parameters without a default, because none was ever published."""
    parameters = signature(function).parameters
    return {name for name in settable(function) if parameters[name].default is Parameter.empty}


def _resolved(function: Callable, annotation: object) -> object:
    """The annotation as types; None if it cannot be read, which a user's file is free to do."""
    one = SimpleNamespace(__annotations__={"x": annotation})
    try:
        return get_type_hints(one, getattr(function, "__globals__", {}), include_extras=True)["x"]
    except Exception:
        return None


def _kinds(annotation: object) -> tuple[Kind, ...]:
    """The members of an annotation, () where one of them is nothing a user could write."""
    if get_origin(annotation) in (Union, UnionType):
        members = [_kinds(x) for x in get_args(annotation)]
        return sum(members, ()) if all(members) else ()
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return (Kind(type(choices[0]), choices),)
    interval = None
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
        interval = next((x for x in marks if isinstance(x, Interval)), None)
    if isinstance(annotation, type) and annotation in PLAIN:
        return (Kind(annotation, (), interval),)
    return ()
