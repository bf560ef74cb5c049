"""The registry: one stabilizer per file, one line per stabilizer.

A stabilizer is a module with `surrogate(b, *, hyper-parameters) -> Surrogate` and, if it reads a
number of the whole optimizer batch, `whole_batch(batches, *, ..., reduce=None) -> {name: number}`.
`bind` joins a module and its arguments into the one callable that the simulator, the audit and the
cluster share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType

from simlab.arguments import check_arguments, check_name, required, settable
from simlab.quantile import Reduce
from simlab.tokens import OPTIONAL, Surrogate, TokenBatch, nothing

NAMES = (
    "asympo",
    "cispo",
    "decoupled",
    "dppo",
    "drpo",
    "estr",
    "gmpo",
    "gspo",
    "icepop",
    "kpop",
    "m2po",
    "minirl",
    "mis",
    "none",
    "opsm",
    "oracle",
    "pg",
    "ppo",
    "sapo",
    "sat",
    "sat_open",
    "seqclip",
    "spo",
    "spo_scaled",
    "tis",
    "two_factor",
    "vaco",
    "vcpo",
)
STABILIZERS: dict[str, ModuleType] = {name: import_module(f"{__name__}.{name}") for name in NAMES}


@dataclass(frozen=True)
class Stabilizer:
    """A registry module with its arguments filled in."""

    name: str
    arguments: dict
    surrogate: partial  # b, **stats -> Surrogate
    whole_batch: partial | None  # batches, reduce= -> stats

    def stats(
        self,
        batches: Iterable[TokenBatch],
        reduce: Reduce | None = None,
        previous: dict | None = None,
    ) -> dict:
        """The whole-batch numbers over all micro-batches of this rank (and, by `reduce`, all ranks).

        `previous` is the answer of the step before, for methods that keep something across steps.
        Raises ValueError without a micro-batch; it may be an empty one.
        """
        if not self.whole_batch:
            return {}
        batches = list(batches)
        if not batches:
            raise ValueError(f"{self.name}: whole-batch numbers need at least one micro-batch")
        kept = (
            {"previous": previous} if "previous" in signature(self.whole_batch).parameters else {}
        )
        return self.whole_batch(batches, reduce=reduce, **kept)

    def __call__(self, b: TokenBatch) -> Surrogate:
        """The surrogate of a batch that is one micro-batch on one rank."""
        return self.surrogate(b, **self.stats([b]))


def parts(name: str) -> dict[str, Callable]:
    """`surrogate` and, if it has one, `whole_batch` of a method. ValueError for an unknown name."""
    check_name("stabilizer", name, STABILIZERS)
    found = {part: getattr(STABILIZERS[name], part, None) for part in ("surrogate", "whole_batch")}
    return {part: function for part, function in found.items() if function}


def bind(name: str, **arguments) -> Stabilizer:
    """A stabilizer by name with hyper-parameters.

    Raises ValueError in one sentence for an unknown name, an unknown argument or an impossible value.
    """
    functions = parts(name)
    own = {part: settable(function) for part, function in functions.items()}
    check_arguments(name, own["surrogate"] | own.get("whole_batch", {}), arguments)
    if missing := {x for f in functions.values() for x in required(f)} - arguments.keys():
        raise ValueError(f"{name} needs {', '.join(sorted(missing))}, which has no published value")
    split = {
        part: partial(functions[part], **{k: v for k, v in arguments.items() if k in known})
        for part, known in own.items()
    }
    bound = Stabilizer(name, arguments, split["surrogate"], split.get("whole_batch"))
    try:
        bound(nothing(0))  # the modules check their own values
    except ValueError:
        raise
    except Exception as error:  # whatever a user's code may raise
        raise ValueError(f"{name}: {_problem(error)}") from error
    return bound


def _problem(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def load(path: Path) -> str:
    """Register the stabilizer of a user's file under the name of the file, and return the name.

    Raises ValueError in one sentence for a file that cannot be imported, has no `surrogate`, or has
    the name of another method. The file is code and runs.
    """
    name = path.stem
    held = STABILIZERS.get(name)
    if held is not None:
        if getattr(held, "__file__", None) == str(path.resolve()):
            return name
        raise ValueError(f"{path}: there is a stabilizer {name} already, rename the file")
    if path.suffix != ".py":
        raise ValueError(f"{path}: is not a .py file")
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(
            f"{path}: the name of the file must be a word, it becomes the method's name"
        )
    spec = spec_from_file_location(f"{__name__}.{name}", path.resolve())
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise ValueError(f"{path}: cannot be loaded ({_problem(error)})") from error
    if not callable(getattr(module, "surrogate", None)):
        raise ValueError(f"{path}: has no function surrogate(b, *, ...)")
    STABILIZERS[name] = module
    return name


def needs(stabilizer: Stabilizer) -> tuple[str, ...]:
    """The optional fields that a stabilizer reads with its arguments, found by leaving each out."""
    found, b = [], nothing(0)
    for name in OPTIONAL:
        try:
            stabilizer(replace(b, **{name: None}))
        except ValueError:
            found.append(name)
    return tuple(found)
