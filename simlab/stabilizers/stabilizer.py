"""A method with its arguments filled in: the one callable that simulator, audit and cluster share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from inspect import signature

import torch
from torch import Tensor

from simlab.core.quantile import Reduce
from simlab.core.tokens import OPTIONAL, Surrogate, TokenBatch, nothing


@dataclass(frozen=True)
class Stabilizer:
    """A method, or a composition of several, with its arguments filled in."""

    name: str
    arguments: dict
    surrogate: Callable[..., Surrogate]  # b, **stats -> Surrogate
    whole_batch: Callable[..., dict] | None  # batches, reduce= -> stats
    doc: str = ""  # its page: the formula in the first line, a paragraph "Source: ..."
    settings: dict = field(
        default_factory=dict
    )  # all arguments, those left at their default included
    leave: Callable[[TokenBatch], Tensor] | None = (
        None  # which tokens leave the mask, bool [..., N]
    )

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

    def counted(self, b: TokenBatch) -> TokenBatch:
        """What S is aggregated over: b, without the tokens that a correction takes out of the mask."""
        return b if self.leave is None else b.without(self.leave(b))

    @property
    def formula(self) -> str:
        """What stands behind the name in the first line of its page."""
        first = self.doc.strip().partition("\n")[0]
        return first.partition(": ")[2].rstrip(".")


def needs(stabilizer: Callable[[TokenBatch], object]) -> tuple[str, ...]:
    """The optional fields that a method reads with its arguments, found by leaving each out."""
    found, b = [], nothing(0)
    for name in OPTIONAL:
        try:
            stabilizer(replace(b, **{name: None}))
        except ValueError:
            found.append(name)
    return tuple(found)


def check_average(stabilizer: Stabilizer) -> None:
    """Raises ValueError where a whole-batch number cannot be averaged over steps: one for each prompt."""
    for name, x in stabilizer.stats([nothing(0)]).items():
        if torch.as_tensor(x).dim():
            raise ValueError(
                f"{stabilizer.name}: quantile ema averages numbers over steps, and {name} is one for each "
                "prompt, whose prompts are others at every step; choose quantile each_step"
            )
