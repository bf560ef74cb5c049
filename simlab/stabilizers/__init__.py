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
    check_name("stabilizer", name, STABILIZERS)
    parts = {part: getattr(STABILIZERS[name], part, None) for part in ("surrogate", "whole_batch")}
    own = {part: settable(function) for part, function in parts.items() if function}
    check_arguments(name, own["surrogate"] | own.get("whole_batch", {}), arguments)
    split = {
        part: partial(parts[part], **{k: v for k, v in arguments.items() if k in known})
        for part, known in own.items()
    }
    bound = Stabilizer(name, split["surrogate"], split.get("whole_batch"))
    bound(_empty())  # the modules check their own values
    return bound


KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}


def check_name(kind: str, name: str, registry: Iterable[str]) -> None:
    """Raises ValueError, listing what there is, for a name that is not in the registry."""
    if name not in registry:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(registry)}")


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
