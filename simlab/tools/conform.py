"""`simlab conform my_loss.py --against METHOD`: is my loss the same function, in value and gradient?

Both run on the batches of the contract, on large log-ratios and on log-probs of 0. A file has
`surrogate(b, ...)` as every method file, or a plain `loss(logp, logp_mu, advantage, mask)` of padded
tensors `[B, T]` that returns what is minimised: one number a token `[B, T]`, or their mean over the tokens
of the mask. Such a function sees log-ratios up to 20 nats only: what every method does about overflow it need
not do. A batch on which they differ is made as small as it can be, and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from pydantic import Field
from torch import Tensor

from simlab.contract.batches import certain, extreme, graded, ragged
from simlab.core.per_response import response_lengths
from simlab.core.tokens import TokenBatch, log_ratio, on_mask
from simlab.core.user_files import module_of, problem
from simlab.stabilizers import STABILIZERS, Stabilizer, bind, load, needs
from simlab.study.command_line import parse
from simlab.study.specs import parse as parse_spec
from simlab.study.strict import Strict

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
FAR = 20.0  # nats, the largest log-ratio that a plain function sees
SHOWN = 12  # tokens of the smallest batch that are printed


class Conform(Strict):
    """Compare a loss with a method, value and gradient; print the smallest batch on which they differ.

    Exit code 0 where they are equal, 1 where they differ.
    """

    mine: Annotated[str, tyro.conf.Positional]
    """A file with surrogate(b, ...) or with loss(logp, logp_mu, advantage, mask) on [B, T]; or a method, as in --against."""
    against: str
    """A method or composition: ppo:eps_high=0.28, gspo+tis, another file."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """Largest difference, relative to the larger of 1 and the number itself, in float64."""


@dataclass(frozen=True)
class Difference:
    """A batch on which the two differ: S (or the mean) and gradient of each, and the batch's name."""

    batch: TokenBatch
    where: str
    S: tuple[Tensor, Tensor]
    grad: tuple[Tensor, Tensor]


def run_conform(words: list[str]) -> None:
    """`simlab conform`."""
    options = parse(Conform, words, "simlab conform")
    torch.set_num_threads(1)  # the batches are tiny
    theirs, mine = method(options.against), either(options.mine)
    difference, tried = conform(mine, theirs, options.tolerance)
    if difference is None:
        print(
            f"{options.mine} and {options.against} are equal on {tried} batches, value and gradient"
        )
        return
    print(f"{options.mine} and {options.against} differ\n")
    print(told(difference, theirs, isinstance(mine, Stabilizer)))
    raise SystemExit(1)


def method(spec: str) -> Stabilizer:
    """A method of the registry, a composition or a method file. Raises ValueError in one sentence."""
    if spec.endswith(".py"):
        return bind(load(Path(spec)))
    _, name, _, arguments = parse_spec(spec)
    return bind(name, **arguments)


def either(spec: str) -> Stabilizer | Loss:
    """A method, or the plain function `loss` of a file. Raises ValueError in one sentence."""
    if not spec.endswith(".py"):
        return method(spec)
    path = Path(spec)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.stem in STABILIZERS:
        return method(spec)
    module = module_of(path, "simlab.tools")
    if callable(getattr(module, "surrogate", None)):
        return method(spec)
    if not callable(function := getattr(module, "loss", None)):
        raise ValueError(
            f"{path}: has neither surrogate(b, ...) nor loss(logp, logp_mu, advantage, mask)"
        )
    return function


def batches() -> Iterator[tuple[str, TokenBatch]]:
    """Seeded batches with names: ragged, of advantages by token, nearly on-policy, and the extremes."""
    for seed in range(6):
        kind = ", an advantage a token" if seed % 2 else ""
        yield f"ragged responses{kind}", ragged(seed, by_token=seed % 2 == 1)
    for seed in range(4):
        b = ragged(20 + seed, sizes=(1,) * 24, masked=0.0)
        yield "responses of one token", b
        near = b.logp_mu + 0.05 * log_ratio(b)
        yield "log-ratios of a few percent", replace(b, logp=near)
    yield "equal policies", replace(b, logp=b.logp_mu)
    for anchor in (0.0, 1.0):
        yield "log-ratios up to 700", extreme(anchor, torch.float64)
    yield "log-probs of 0", certain(torch.float64)


def conform(
    mine: Stabilizer | Loss, theirs: Stabilizer, tolerance: float
) -> tuple[Difference | None, int]:
    """The smallest difference that was found, or None, and the number of batches. ValueError for a loss that fails."""
    tried, bare = 0, not isinstance(mine, Stabilizer)
    if bare:
        unseen = [x for x in needs(theirs) if x != "position"]
        if unseen:
            raise ValueError(
                f"{theirs.name} reads {', '.join(unseen)}, which a loss of four tensors is not given; "
                "write it as surrogate(b, ...)"
            )
    for where, b in batches():
        tried += 1
        if bare:
            d = log_ratio(b).clamp(-FAR, FAR)
            b = replace(b, logp=torch.where(d > 0, b.logp, b.logp_mu + d).clamp(max=0))
            b = replace(b, logp_mu=b.logp - d)
        if differ(mine, theirs, b, tolerance) is not None:
            small = smallest(b, lambda x: differ(mine, theirs, x, tolerance) is not None)
            S, grad = differ(mine, theirs, small, tolerance) or ((), ())
            return Difference(small, where, S, grad), tried
    return None, tried


def differ(
    mine: Stabilizer | Loss, theirs: Stabilizer, b: TokenBatch, tolerance: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """((S, S), (gradient, gradient)) where they are not equal, else None."""
    one = plain(mine, b) if not isinstance(mine, Stabilizer) else of_method(mine, b)
    two = of_method(theirs, b)
    if one[0].dim() == 0:  # a mean: theirs too
        n = b.mask.sum().clamp(min=1)
        two = two[0].sum() / n, two[1] / n
    pairs = (one[0], two[0]), (one[1], two[1])
    equal = all(_equal(x, y, tolerance) for x, y in pairs)
    return None if equal else pairs


def of_method(stabilizer: Stabilizer, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """(S, gradient) `[N]` of a method; S of tokens, 0 where masked."""
    out, grad = graded(stabilizer, b)
    return out.S.detach(), grad


def plain(loss: Loss, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """(S, gradient) of a loss of padded tensors, whose sign is turned. Raises ValueError in one sentence."""
    lengths = torch.bincount(b.response, minlength=b.n_responses)
    width = int(lengths.max()) if len(lengths) else 0
    order = b.response.argsort(stable=True)
    column = torch.cat([torch.arange(int(n)) for n in lengths])
    row = b.response[order]
    shape = (b.n_responses, width)

    def padded(x: Tensor, fill: float | bool) -> Tensor:
        out = torch.full(shape, fill, dtype=x.dtype)
        out[row, column] = x[order]
        return out

    logp = padded(b.logp, -1.0).requires_grad_()
    mask = padded(b.mask, False)
    try:
        out = loss(logp, padded(b.logp_mu, -1.0), padded(b.advantage, 0.0), mask)
        if not isinstance(out, Tensor) or out.shape not in (mask.shape, ()):
            raise ValueError(
                f"it must return a tensor of one number, or {list(shape)}, got "
                f"{list(out.shape) if isinstance(out, Tensor) else out!r}"
            )
        total = torch.where(mask, out, 0.0).sum() if out.dim() else out
        (grad,) = torch.autograd.grad(total, logp, allow_unused=True, materialize_grads=True)
    except Exception as error:  # whatever a user's code may raise
        raise ValueError(f"loss: {problem(error)}") from error
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    S = torch.where(mask, -out.detach(), 0.0)[row, column][back] if out.dim() else -out.detach()
    return S, -grad[row, column][back]


def _equal(x: Tensor, y: Tensor, tolerance: float) -> bool:
    x, y = x.double(), y.double()
    size = torch.maximum(x.abs(), y.abs()).clamp(min=1)
    return bool((((x - y).abs() <= tolerance * size) | (x == y)).all())


def smallest(b: TokenBatch, differs: Callable[[TokenBatch], bool]) -> TokenBatch:
    """A part of b that still differs and none of whose tokens can be left out: halves first, then one by one."""
    size = max(len(b.logp) // 2, 1)
    while True:
        start = 0
        while start < len(b.logp) and len(b.logp) > 1:
            index = torch.arange(len(b.logp))
            less = _numbered(b.take(index[(index < start) | (index >= start + size)]))
            if len(less.logp) and differs(less):
                b = less
            else:
                start += size
        if size == 1:
            return b
        size = max(size // 2, 1)


def _numbered(b: TokenBatch) -> TokenBatch:
    """The same tokens with responses 0, 1, ... in order of their numbers."""
    _, response = torch.unique(b.response, return_inverse=True)
    return replace(b, response=response, n_responses=None, _seen=None)


def told(difference: Difference, theirs: Stabilizer, methods: bool) -> str:
    """The smallest batch as a table: what both read, and what each makes of it."""
    b = difference.batch
    columns = {
        "response": b.response.tolist(),
        "pi": b.logp.exp().tolist(),
        "mu": b.logp_mu.exp().tolist(),
    }
    columns |= {"d": log_ratio(b).tolist(), "A": on_mask(b, b.advantage).tolist()}
    columns |= {
        x: getattr(b, x).tolist()
        for x in (needs(theirs) if methods else ())
        if x not in ("topk", "topk_mu")
    }
    for name, pair in (("S", difference.S), ("gradient", difference.grad)):
        for who, x in zip(("mine", "theirs"), pair, strict=True):
            columns[f"{name} {who}"] = (
                x.tolist() if x.dim() else [x.item()] + [None] * (len(b.logp) - 1)
            )
    lengths = response_lengths(b).tolist()
    rows = [[_number(x[i]) for x in columns.values()] for i in range(min(len(b.logp), SHOWN))]
    widths = [max(len(name), *(len(r[i]) for r in rows)) for i, name in enumerate(columns)]
    lines = [
        "  ".join(f"{x:>{w}}" for x, w in zip(r, widths, strict=True))
        for r in (list(columns), *rows)
    ]
    more = len(b.logp) - len(rows)
    head = f"smallest difference, from a batch of {difference.where}: {len(b.logp)} token{'s' * (len(b.logp) > 1)}, {len(lengths)} response{'s' * (len(lengths) > 1)}"
    return "\n".join([head, *lines, *([f"and {more} more tokens"] if more else [])])


def _number(x: object) -> str:
    return f"{x + 0.0:.6g}" if isinstance(x, float) else "" if x is None else str(x)
