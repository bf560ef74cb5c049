"""What adapters share: a method from its spec, refused in one sentence where a trainer lacks what it reads."""

from __future__ import annotations

from torch import Tensor

from simlab.core.aggregate import reduce_diagnostics
from simlab.core.tokens import TokenBatch
from simlab.stabilizers import Stabilizer, bind, needs
from simlab.study.specs import parse


def method(
    spec: str, trainer: str, given: tuple[str, ...], whole_batch: bool = False
) -> Stabilizer:
    """The method of `[label=]name[:argument=value,...][+term...]`, once it is `served`."""
    _, name, _, arguments = parse(spec)
    bound = bind(name, **arguments)
    served(bound, spec, trainer, given, whole_batch)
    return bound


def served(
    bound: Stabilizer, spec: str, trainer: str, given: tuple[str, ...], whole_batch: bool
) -> None:
    """Refuse what the plug point of a trainer cannot serve.

    `given` are the optional fields that the trainer hands over, `whole_batch` whether numbers of the whole
    batch can be had. Raises ValueError for a method that needs more, or drops tokens from the denominator.
    """
    if lacking := [x for x in needs(bound) if x not in given]:
        raise ValueError(f"{spec}: {trainer} hands a loss no {', '.join(lacking)}")
    if bound.whole_batch and not whole_batch:
        raise ValueError(
            f"{spec} reads a number of the whole batch, and {trainer} hands a loss a part of it; "
            'whole_batch="micro" takes the number of that part'
        )
    if bound.leave is not None:
        raise ValueError(
            f"{spec}: {trainer} counts tokens before the loss; rejected tokens cannot leave its denominator"
        )


def label(spec: str) -> str:
    """What the method is called there: its label, or the spec."""
    return parse(spec)[0]


def numbers(b: TokenBatch, out) -> dict[str, Tensor]:
    """The diagnostics of a surrogate, one number each, without a gradient."""
    return {k: x.detach() for k, x in reduce_diagnostics(b, out.diagnostics).items()}
