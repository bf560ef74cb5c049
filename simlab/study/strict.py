"""Settings that are taken as written, and what is said of those that cannot be: one sentence with the key,
the value and the nearest known key."""

from __future__ import annotations

from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import ErrorDetails

from simlab.study.command_line import UserError


class ConfigError(UserError):
    """Impossible settings; the message is one sentence that names the field."""


class Strict(BaseModel):
    """Immutable, unknown keys are errors, values are taken as written, and an error is a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data):
        try:
            super().__init__(**data)
        except ValidationError as error:
            said = "; ".join(_sentence(type(self), e) for e in error.errors())
            raise ConfigError(said) from error

    __init__.__pydantic_base_init__ = True  # sections within sections: errors keep their whole path

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_written(cls, value, handler):
        """No text for a number, no truth for a number, no 2.0 for a whole number."""
        read = handler(value)
        for kind, word in WORDS.items():
            if type(read) is kind and isinstance(value, bool | int | float | str):
                fits = isinstance(value, (int, float) if kind is float else kind)
                if not fits or isinstance(value, bool) != (kind is bool):
                    raise ValueError(f"must be {word}")
        return read


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


KINDS = {  # of pydantic's errors, those whose words are Python's
    "tuple_type": 'must be a list, such as ["a", "b"]',
    "model_type": "must be a section with settings of its own",
    "dict_type": "must be a section with names and values",
    "missing": "is missing",
}


def _sentence(model: type[Strict], error: ErrorDetails) -> str:
    where = ".".join(str(part) for part in error["loc"])
    message = f"{where}: " * bool(where) + error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"{where}: there is no such setting; {_nearest(where, _names(model))}"
    elif error["type"] in KINDS:
        message = f"{where}: {KINDS[error['type']]}"
    whole = isinstance(error["input"], BaseModel | dict)  # a section with all its keys
    return message if whole else f"{message} (got {error['input']!r})"


def _nearest(wrong: str, names: list[str]) -> str:
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    section, _, word = wrong.rpartition(".")
    if near := get_close_matches(word, last, 1):
        return f"did you mean {last[near[0]]}?"
    beside = [name for name in names if name.rpartition(".")[0] == section]
    return f"there are {', '.join(beside or names)}"


def _names(model: type[Strict], prefix: str = "") -> list[str]:
    """Dotted names of the settings of a section and of the sections within."""
    found = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Strict):
                found += _names(kind, f"{prefix}{name}.")
    return found


class Command(Strict):
    """What every command takes."""

    debug: bool = False
    """Show the traceback of an error too."""
