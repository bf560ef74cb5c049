"""Seeded batches for tests: ragged responses, masked positions, heavy tails; and how to run a loss."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from simlab.tokens import TokenBatch

SIZES = (1, 7, 2, 1, 4, 12, 3)  # tokens of each response; response 2 has d = 0 on both tokens


def ragged(seed=0, lanes=(), sizes=SIZES, dtype=torch.float64, by_token=False, masked=0.2):
    """A batch `[*lanes, N]` with tokens in random order and d up to a few nats.

    Advantages are constant on each response (0 on one of them), or `by_token` vary token by token
    with some zeros; there response 2 holds +1.5 and -1.5, which cancel in a sequence gradient.
    """
    rng = torch.Generator().manual_seed(seed)
    shape = (*lanes, sum(sizes))
    response = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).expand(shape)
    normal = torch.randn(3, *shape, generator=rng, dtype=torch.float64)
    tail = normal[0] / torch.randn(shape, generator=rng, dtype=torch.float64).abs().clamp(min=0.05)
    d = torch.where(response == 2, 0.0, 0.15 * tail)
    logp_mu = -0.05 - torch.empty(shape, dtype=torch.float64).exponential_(1, generator=rng)
    logp = torch.where(response == 2, logp_mu, (logp_mu + d).clamp(max=-0.01))
    prox = (logp_mu + 0.6 * (logp - logp_mu) + 0.1 * normal[1]).clamp(max=-0.01)
    level = torch.randn(*lanes, len(sizes), generator=rng, dtype=torch.float64)
    level[..., -1] = 0
    advantage = level.gather(-1, response)
    if by_token:
        advantage = torch.where(normal[2].abs() < 0.3, 0.0, normal[2])
        first = (response == 2) & (response.roll(1, -1) != 2)
        advantage = torch.where(response == 2, torch.where(first, 1.5, -1.5), advantage)
    mask = (torch.rand(shape, generator=rng) >= masked) | (response == 2) | (response == 0)
    order = torch.rand(shape, generator=rng).argsort(-1)
    put = [x.gather(-1, order) for x in (logp, logp_mu, advantage, mask, response, prox)]
    logp, logp_mu, advantage, mask, response, prox = put
    return cast(
        TokenBatch(
            logp, logp_mu, advantage, mask, response, logp_prox=prox, n_responses=len(sizes)
        ),
        dtype,
    )


def cast(b, dtype):
    """The same batch with its float fields in another dtype."""
    return replace(
        b,
        logp=b.logp.to(dtype),
        logp_mu=b.logp_mu.to(dtype),
        advantage=b.advantage.to(dtype),
        logp_prox=None if b.logp_prox is None else b.logp_prox.to(dtype),
    )


def tokens(d, A=1.0, *, mu=-1.0, mask=None, response=None, prox=None, dtype=torch.float64):
    """A batch from a list of log-ratios: logp = mu + d; every token its own response by default."""
    d = torch.as_tensor(d, dtype=dtype)
    logp_mu = torch.as_tensor(mu, dtype=dtype).expand(d.shape).clone()
    mask = torch.ones(d.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    if response is None:
        response = torch.arange(d.shape[-1]).expand(d.shape)
    return TokenBatch(
        logp=logp_mu + d,
        logp_mu=logp_mu,
        advantage=torch.as_tensor(A, dtype=dtype).expand(d.shape).clone(),
        mask=mask,
        response=torch.as_tensor(response),
        logp_prox=None if prox is None else torch.as_tensor(prox, dtype=dtype),
    )


def graded(bound, b, **stats):
    """Surrogate of b and the gradient of its sum with respect to logp."""
    logp = b.logp.detach().clone().requires_grad_()
    out = bound.surrogate(replace(b, logp=logp), **(stats or bound.stats([b])))
    (grad,) = torch.autograd.grad(out.S.sum(), logp)
    return out, grad


def by_response(b, groups):
    """Micro-batches of b `[N]`, one for each group of response indices."""
    return [b.take(torch.isin(b.response, torch.tensor(g)).nonzero().squeeze(-1)) for g in groups]


def on_ranks(n, work):
    """[work(rank, reduce) for n ranks], one thread each; `reduce` sums over them as all-reduce does."""
    barrier, box = threading.Barrier(n, timeout=20), [None] * n

    def run(rank):
        def reduce(x):
            box[rank] = x
            barrier.wait()
            total = sum(box)
            barrier.wait()
            return total

        return work(rank, reduce)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))
