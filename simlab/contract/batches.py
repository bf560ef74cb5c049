"""Seeded batches on which the promises of a stabilizer are checked, how a loss is run on them, and ranks
as threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from simlab.contract.require import BrokenPromise
from simlab.core.aggregate import AGGREGATIONS
from simlab.core.quantile import Reduce
from simlab.core.tokens import KINDS, TOP, Surrogate, TokenBatch
from simlab.stabilizers import Stabilizer

SIZES = (1, 7, 2, 1, 4, 12, 3)  # tokens of each response; response 2 has d = 0 on both tokens
INTEGER = tuple(name for name, dtype in KINDS.items() if dtype == torch.int64)


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
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    level = torch.randn(*lanes, len(sizes), generator=rng, dtype=torch.float64)
    level[..., -1] = 0
    advantage = level.gather(-1, response)
    if by_token:
        advantage = torch.where(normal[2].abs() < 0.3, 0.0, normal[2])
        first = (response == 2) & (response.roll(1, -1) != 2)
        advantage = torch.where(response == 2, torch.where(first, 1.5, -1.5), advantage)
    likely = logp_mu > -1  # the sampled token is the likeliest itself
    rest = torch.where(
        likely, 0.0, math.log1p(-math.exp(-1))
    )  # the head of response 4 is all of mu
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
        reward=(7 * response % 5) / 4,  # of two answers to a prompt, some prompts with equal ones
        group=response // 2,
        position=torch.arange(sum(sizes)).expand(shape) - starts[response],
        topk=torch.stack(
            [
                torch.where(likely, -torch.inf, (1 - logp.exp()).log() - 1.2),
                (1 - logp.exp()).log() - 1.2,
            ],
            -1,
        ),
        topk_mu=torch.stack(
            [
                torch.where(likely, -torch.inf, (1 - logp_mu.exp()).log() - 1),
                (1 - logp_mu.exp()).log() + torch.where(response == 4, rest, -2),
            ],
            -1,
        ),
        entropy_prox=2 * rand(shape),
        n_responses=len(sizes),
        lanes=bool(lanes),
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
    """Surrogate of b and the gradient of its sum with respect to logp, in the dtype of logp."""
    out, grad = graded_head(bound, b, **stats)
    return out, grad[..., 0].to(b.logp.dtype)


def graded_head(bound: Stabilizer, b: TokenBatch, **stats) -> tuple[Surrogate, Tensor]:
    """Surrogate of b and the gradient of its sum `[..., N, 1 + K]`: of logp, then of each column of topk."""
    names = ["logp"] if b.topk is None else ["logp", "topk"]
    leaves = {name: getattr(b, name).detach().clone().requires_grad_() for name in names}
    out = bound.surrogate(replace(b, **leaves), **(stats or bound.stats([b])))
    grads = torch.autograd.grad(out.S.sum(), list(leaves.values()), allow_unused=True)
    parts = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves.values(), grads, strict=True)
    ]
    return out, torch.cat([parts[0].unsqueeze(-1), *parts[1:]], -1)


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


def certain(dtype: torch.dtype) -> TokenBatch:
    """Log-probs of exactly 0, and of nearly nothing, on every side; one response a token, then all in two.

    Every combination of pi, mu, prox in {0, -1e-8, -2, -90} nats with both signs of the advantage.
    """
    levels = torch.tensor([0.0, -1e-8, -2.0, -90.0], dtype=dtype)
    logp, mu, prox, sign = torch.cartesian_prod(levels, levels, levels, levels[:2]).unbind(-1)
    zero, low = torch.zeros_like(logp), torch.full_like(logp, -40.0)
    n = len(logp)
    b = ragged(sizes=(1,) * n, masked=0.0)
    return replace(
        cast(b, dtype),
        logp=logp,
        logp_mu=mu,
        logp_prox=prox,
        logp_ref=mu,
        advantage=torch.where(sign == 0, 1.0, -1.0).to(dtype),
        entropy_mu=zero,
        entropy_prox=zero,
        gini_mu=zero,
        tv=zero,
        uniform=zero,
        response=torch.arange(n),
        topk=torch.stack([torch.full_like(logp, -torch.inf), low], -1),
        topk_mu=torch.stack([torch.full_like(logp, -torch.inf), low], -1),
    )


def on_ranks(n: int, work: Callable[[int, Reduce], object]) -> list:
    """[work(rank, reduce) for n ranks], one thread each; `reduce` sums over them as all-reduce does.

    Raises BrokenPromise where the ranks do not call it equally often, on which a cluster would hang.
    """
    turn, sent, done = threading.Condition(), [[] for _ in range(n)], [False] * n

    def run(rank: int):
        def reduce(x: Tensor) -> Tensor:
            with turn:
                sent[rank].append(torch.as_tensor(x).clone())  # the caller may write into x
                call = len(sent[rank])
                turn.notify_all()
                turn.wait_for(
                    lambda: all(len(y) >= call or z for y, z in zip(sent, done, strict=True))
                )
                if min(len(y) for y in sent) < call:
                    raise BrokenPromise(
                        "a rank calls `reduce` more often than another, and a cluster would hang: "
                        "call it for empty batches too"
                    )
                return torch.stack([y[call - 1] for y in sent]).sum(0)

        try:
            return work(rank, reduce)
        finally:
            with turn:
                done[rank] = True
                turn.notify_all()

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))
