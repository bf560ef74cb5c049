"""Whole-batch statistics: per-response sums, mismatch measures, advantages, reduced diagnostics.

Everything here is computed once for the optimizer batch, across micro-batches and ranks, and handed
to the loss as a number. `reduce` is the caller's sum over ranks (a torch.distributed all-reduce, or
nothing); integer counts go through it, so the answer does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import TokenBatch


# ---------------------------------------------------------------- per response
def response_sums(b: TokenBatch, x: Tensor) -> Tensor:
    """Sum of x over the active tokens of each response: `[..., n_responses]`."""
    out = torch.zeros(*x.shape[:-1], b.n_responses, dtype=x.dtype, device=x.device)
    index = torch.where(b.mask, b.response, 0)
    return out.scatter_add(-1, index, torch.where(b.mask, x, 0))


def response_lengths(b: TokenBatch) -> Tensor:
    """Active tokens of each response: `[..., n_responses]`, int64; 0 for an absent response."""
    return response_sums(b, b.mask.long())


def to_tokens(b: TokenBatch, per_response: Tensor) -> Tensor:
    """Hand each active token the value `[..., n_responses]` of its response; 0 where masked."""
    index = torch.where(b.mask, b.response, 0)
    return torch.where(b.mask, per_response.gather(-1, index), 0)


class _ResponseMeans(torch.autograd.Function):
    """Averaging over responses is a symmetric matrix: the backward pass is the forward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, response: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(mask, response, lengths)
        return _means(x, mask, response, lengths)

    @staticmethod
    def backward(ctx, g: Tensor):
        return _means(g, *ctx.saved_tensors), None, None, None


def _means(x: Tensor, mask: Tensor, response: Tensor, lengths: Tensor) -> Tensor:
    index = torch.where(mask, response, 0)
    sums = torch.zeros_like(lengths, dtype=x.dtype)
    sums = sums.scatter_add(-1, index, torch.where(mask, x, 0)) / lengths
    return torch.where(mask, sums.gather(-1, index), 0)


def response_means(b: TokenBatch, x: Tensor) -> Tensor:
    """Mean of x over each response, handed back to its tokens: `[..., N]`. Whole responses only."""
    lengths = response_sums(b, b.mask.to(x.dtype)).clamp(min=1)
    return _ResponseMeans.apply(x, b.mask, b.response, lengths)


# ---------------------------------------------------------------- mismatch
def global_counts(batches: Iterable[TokenBatch], reduce: Reduce | None = None) -> dict[str, Tensor]:
    """Active tokens and non-empty responses of the whole batch `[...]`, int64.

    Responses are counted per micro-batch, so a response must not be spread over two of them.
    """
    batches = list(batches)
    return {
        "tokens": summed((b.mask.sum(-1) for b in batches), reduce),
        "responses": summed(((response_lengths(b) > 0).sum(-1) for b in batches), reduce),
    }
