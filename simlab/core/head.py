"""The head of the next-token distribution: mu's likeliest tokens, where a loss may have a gradient.

`TokenBatch.topk` and `topk_mu` are [..., N, K]: log pi and log mu of the K likeliest tokens of mu at the
state of each sampled token, the likeliest first, full-vocabulary log-probs that are never renormalised.
Where one of them is the sampled token itself, both are -inf: its log-probs are `logp` and `logp_mu`, and
no mass or gradient counts twice. A row with a -inf in `topk` therefore holds the sampled token. (A row
that is padded with -inf has every token that mu can draw, the sampled one among them.) With K = V the
head is the whole distribution. A gradient on `topk` is one on tokens that were not sampled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.tokens import TokenBatch, first_derivative_only

Columns = Annotated[int, Interval("[1, inf)")] | None  # how many columns a method reads; None: all
COVERED = 1e-4  # mass of mu that may lie outside of a head that is called whole


class Head(NamedTuple):
    """Columns `[..., N, K]` in the working dtype; -inf where a row is masked."""

    logp: Tensor  # nats, under pi, with its gradient
    logp_mu: Tensor  # nats, under mu, a constant
    sampled: Tensor  # [..., N] bool, whether the sampled token is one of the columns


def head(b: TokenBatch, method: str, columns: int | None = None) -> Head:
    """The first `columns` columns of the batch (None: all). Raises ValueError where it has none."""
    pi, mu = (b.need(name, method) for name in ("topk", "topk_mu"))
    hidden = ~b.mask.unsqueeze(-1)
    pi, mu = (x[..., :columns].to(b.dtype).masked_fill(hidden, -torch.inf) for x in (pi, mu))
    return Head(pi, mu.detach(), b.mask & (pi == -torch.inf).any(-1))


def head_uncertainty(b: TokenBatch, method: str, scale: str = "entropy") -> Tensor:
    """Entropy in nats, or Gini index (`scale` gini), `[..., N]` of mu coarsened to its head, the sampled token
    and one bucket for the rest: at most mu's own. 0 where masked; no gradient."""
    _, mu, _ = head(b, method)
    own = torch.where(b.mask, b.logp_mu.to(b.dtype), -torch.inf).detach()
    named = torch.cat([mu, own.unsqueeze(-1)], -1)
    rest = (1 - named.exp().sum(-1, keepdim=True)).clamp(min=0)
    p = torch.cat([named.exp(), rest], -1)
    if scale == "gini":
        return torch.where(b.mask, 1 - p.square().sum(-1), 0.0)
    return torch.where(b.mask, torch.special.entr(p).sum(-1), 0.0)


def on_support(b: TokenBatch, method: str = "support replay") -> TokenBatch:
    """b with pi renormalised on the tokens that mu can draw, where the head holds them all.

    The set S of a row is its columns of positive `topk_mu` and the sampled token; log pi^S = log pi -
    log sum_S pi replaces `logp` and `topk` (-inf outside of S), with their gradients. A row whose head
    misses more than COVERED of mu's mass stays as it is. It is the replay of a sampler that truncates;
    fields of other policies (`logp_prox`, `logp_ref`) are not changed. Raises ValueError without a head.
    """
    pi, mu, _ = head(b, method)
    own, drawn = (torch.where(b.mask, x.to(b.dtype), 0.0) for x in (b.logp, b.logp_mu))
    whole = (1 - drawn.detach().exp() - mu.exp().sum(-1)).abs() <= COVERED
    inside = torch.where(mu > -torch.inf, pi, -torch.inf)
    mass = torch.cat([inside, own.unsqueeze(-1)], -1).logsumexp(-1)
    use = whole & b.mask
    return replace(
        b,
        logp=torch.where(use, own - mass, b.logp.to(b.dtype)),
        topk=torch.where(use.unsqueeze(-1), inside - mass.unsqueeze(-1), pi),
    )


class _GradedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, top: Tensor, S: Tensor, w: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(w, c)
        return S.view_as(S)

    @staticmethod
    def backward(ctx, g: Tensor):
        first_derivative_only()
        w, c = ctx.saved_tensors
        return g * w, g.unsqueeze(-1) * c, None, None, None


def graded_head(x: Tensor, top: Tensor, S: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """`graded` of two inputs: dS/dx = w `[..., N]` and dS/dtop = c, for head columns `[..., N, K]`."""
    return _GradedHead.apply(x, top, S, w, c)
