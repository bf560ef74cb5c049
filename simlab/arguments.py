"""Hyper-parameters of plain functions: which there are, and whether what a user wrote fits them."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, formatannotation, signature

KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}


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


def check_arguments(who: str, known: dict[str, str], arguments: dict) -> None:
    """Raises ValueError for an argument that is unknown or none of the types of its annotation."""
    if unknown := arguments.keys() - known.keys():
        raise ValueError(
            f"{who} has no argument {', '.join(sorted(unknown))}; "
            f"it takes {', '.join(sorted(known)) or 'none'}"
        )
    for key, value in arguments.items():
        if not any(
            isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
            for kind in known[key].split(" | ")
        ):
            raise ValueError(f"{who}: {key} must be {known[key]}, got {value!r}")


def settable(function) -> dict[str, str]:
    """Annotations of the hyper-parameters: keyword-only and of plain types. Whole-batch numbers
    are annotated as tensors, and the caller supplies them."""
    found = {}
    for p in signature(function).parameters.values():
        text = p.annotation if isinstance(p.annotation, str) else formatannotation(p.annotation)
        if p.kind == p.KEYWORD_ONLY and set(text.split(" | ")) <= KINDS.keys():
            found[p.name] = text
    return found


def required(function) -> set[str]:
    """Hyper-parameters without a default, because none was ever published."""
    parameters = signature(function).parameters
    return {name for name in settable(function) if parameters[name].default is Parameter.empty}
