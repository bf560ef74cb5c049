"""The registry: one stabilizer per file, one line per stabilizer.

A stabilizer is a module with `surrogate(b, *, hyper-parameters) -> Surrogate` and, if it reads a
number of the whole optimizer batch, `whole_batch(batches, *, ..., reduce=None) -> {name: number}`.
`bind` joins a module and its arguments into the one callable that the simulator, the audit and the
cluster share.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from simlab.batch_stats import Reduce
from simlab.stabilizers import dppo, gspo, icepop, kpop, none, pg, ppo, sat, tis
from simlab.tokens import Surrogate, TokenBatch

STABILIZERS: dict[str, ModuleType] = {
    "dppo": dppo,
    "gspo": gspo,
    "icepop": icepop,
    "kpop": kpop,
    "none": none,
    "pg": pg,
    "ppo": ppo,
    "sat": sat,
    "tis": tis,
}


@dataclass(frozen=True)
class Stabilizer:
    """A registry module with its arguments filled in."""

    name: str
    surrogate: partial  # b, **stats -> Surrogate
    whole_batch: partial | None  # batches, reduce= -> stats

    def stats(self, batches: Iterable[TokenBatch], reduce: Reduce | None = None) -> dict:
        """The whole-batch numbers over all micro-batches of this rank (and, by `reduce`, all ranks)."""
        return self.whole_batch(batches, reduce=reduce) if self.whole_batch else {}

    def __call__(self, b: TokenBatch) -> Surrogate:
        """The surrogate of a batch that is one micro-batch on one rank."""
        return self.surrogate(b, **self.stats([b]))


def bind(name: str, **arguments) -> Stabilizer:
    """A stabilizer by name with hyper-parameters.

    Raises ValueError in one sentence for an unknown name, an unknown argument or an impossible value.
    """
    if name not in STABILIZERS:
        raise ValueError(f"no stabilizer {name!r}; there are {', '.join(STABILIZERS)}")
    module = STABILIZERS[name]
    split, unknown = {}, set(arguments)
    for part in ("surrogate", "whole_batch"):
        if function := getattr(module, part, None):
            own = settable(function)
            unknown -= own.keys()
            check_types(name, own, arguments)
            split[part] = partial(function, **{k: v for k, v in arguments.items() if k in own})
    if unknown:
        known = sorted({a for f in split.values() for a in settable(f.func)})
        raise ValueError(
            f"{name} has no argument {', '.join(sorted(unknown))}; "
            f"it takes {', '.join(known) or 'none'}"
        )
    bound = Stabilizer(name, split["surrogate"], split.get("whole_batch"))
    bound(_empty())  # the modules check their own values
    return bound


KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}


def check_types(name: str, annotations: dict[str, str], arguments: dict) -> None:
    """Raises ValueError for an argument that is none of the types its annotation names."""
    for key in annotations.keys() & arguments.keys():
        value, kinds = arguments[key], annotations[key].split(" | ")
        if not any(
            isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
            for kind in kinds
        ):
            raise ValueError(f"{name}: {key} must be {annotations[key]}, got {value!r}")


def settable(function) -> dict[str, str]:
    """Annotations of the hyper-parameters: keyword-only, with a default, not the reducer."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: p.annotation
        for p in parameters
        if p.kind == p.KEYWORD_ONLY and p.default is not p.empty and p.name != "reduce"
    }


def _empty() -> TokenBatch:
    x = torch.zeros(0)
    return TokenBatch(x, x, x, x.bool(), x.long(), logp_prox=x, entropy_mu=x, version=x.long())
