"""Seeded batches on which the promises of a stabilizer are checked, and how a loss is run on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from simlab.aggregate import AGGREGATIONS
from simlab.stabilizers import Stabilizer
from simlab.tokens import TOP, Surrogate, TokenBatch

SIZES = (1, 7, 2, 1, 4, 12, 3)  # tokens of each response; response 2 has d = 0 on both tokens
INTEGER = ("response", "age", "stratum")


def ragged(
    seed: int = 0,
    lanes: Sequence[int] = (),
    sizes: Sequence[int] = SIZES,
    dtype: torch.dtype = torch.float64,
    by_token: bool = False,
    masked: float = 0.2,
) -> TokenBatch:
    """A batch `[*lanes, N]` with tokens in random order and d up to a few nats.

    Advantages are constant on each response (0 on one of them), or `by_token` vary token by token
    with some zeros; there response 2 holds +1.5 and -1.5, which cancel in a sequence gradient.
    """
    rng = torch.Generator().manual_seed(seed)
    shape = (*lanes, sum(sizes))
    rand = partial(torch.rand, generator=rng, dtype=torch.float64)
    response = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).expand(shape)
    normal = torch.randn(4, *shape, generator=rng, dtype=torch.float64)
    d = torch.where(response == 2, 0.0, 0.15 * normal[0] / normal[3].abs().clamp(min=0.05))
    logp_mu = -0.05 + rand(shape).clamp(min=1e-9).log()
    logp = torch.where(response == 2, logp_mu, (logp_mu + d).clamp(max=-0.01))
    prox = (logp_mu + 0.6 * (logp - logp_mu) + 0.1 * normal[1]).clamp(max=-0.01)
    level = torch.randn(*lanes, len(sizes), generator=rng, dtype=torch.float64)
    level[..., -1] = 0
    advantage = level.gather(-1, response)
    if by_token:
        advantage = torch.where(normal[2].abs() < 0.3, 0.0, normal[2])
        first = (response == 2) & (response.roll(1, -1) != 2)
        advantage = torch.where(response == 2, torch.where(first, 1.5, -1.5), advantage)
    b = TokenBatch(
        logp=logp,
        logp_mu=logp_mu,
        advantage=advantage,
        mask=(rand(shape) >= masked) | (response == 2) | (response == 0),
        response=response,
        logp_prox=prox,
        logp_ref=logp_mu - 0.1 * normal[1],
        entropy_mu=2 * rand(shape),
        gini_mu=rand(shape),
        age=(5 * rand(shape)).long(),
        stratum=(3 * rand(shape)).long(),
        uniform=rand(shape),
        tv=0.3 * rand(shape),
        topk=torch.stack([(1 - x.exp()).log() - 1.2 for x in (logp, logp)], -1),
        topk_mu=torch.stack([(1 - x.exp()).log() - y for x, y in ((logp_mu, 1), (logp_mu, 2))], -1),
        n_responses=len(sizes),
    )
    order = rand(shape).argsort(-1)
    top = order.unsqueeze(-1).expand(*shape, 2)
    put = {
        name: x.gather(-2, top) if name in TOP else x.gather(-1, order)
        for name, x in b.held().items()
    }
    return cast(replace(b, **put), dtype)


def cast(b: TokenBatch, dtype: torch.dtype) -> TokenBatch:
    """The same batch with its float fields in another dtype."""
    return replace(
        b, **{name: x.to(dtype) for name, x in b.held().items() if x.is_floating_point()}
    )


def graded(bound: Stabilizer, b: TokenBatch, **stats) -> tuple[Surrogate, Tensor]:
    """Surrogate of b and the gradient of its sum with respect to logp."""
    logp = b.logp.detach().clone().requires_grad_()
    out = bound.surrogate(replace(b, logp=logp), **(stats or bound.stats([b])))
    (grad,) = torch.autograd.grad(out.S.sum(), logp)
    return out, grad


def by_response(b: TokenBatch, groups: Sequence[Sequence[int]]) -> list[TokenBatch]:
    """Micro-batches of b `[N]`, one for each group of response indices."""
    return [b.take(torch.isin(b.response, torch.tensor(g)).nonzero().squeeze(-1)) for g in groups]


def aggregate(how: str, S: Tensor, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """(sum, count) by a named aggregation; horizon 7 where one is needed."""
    extra = {"horizon": 7} if how == "seq_mean_token_sum_norm" else {}
    return AGGREGATIONS[how](S, b, **extra)


def extreme(anchor: float, dtype: torch.dtype) -> TokenBatch:
    """Log-ratios up to 700 (C045), each its own response; prox at mu (0), at pi (1), or between."""
    d = torch.tensor([50.0, 50, 700, 700, -700, -700, -50, -50, 0.1], dtype=dtype)
    b = cast(ragged(sizes=(1,) * len(d), masked=0.0), dtype)
    mu = -1 - d.clamp(min=0)
    sign = torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1, 1], dtype=dtype)
    response = torch.arange(len(d))
    prox = mu + anchor * d
    return replace(b, logp=mu + d, logp_mu=mu, advantage=sign, logp_prox=prox, response=response)
