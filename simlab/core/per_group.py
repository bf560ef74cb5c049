"""Whole-batch numbers of each group, the answers to one prompt, over micro-batches and ranks.

Groups are numbered from 0 on over the whole batch (`TokenBatch.group`), so one group may lie in several
micro-batches and on several ranks. Sums are kept in float64.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.core.per_response import response_lengths, response_sums
from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import TokenBatch, on_mask


def group_of(b: TokenBatch, method: str) -> Tensor:
    """The group of each response `[..., n_responses]`, -1 for an absent one.

    Raises ValueError without `group`, or for a negative one on a token of the mask.
    """
    group = torch.where(b.mask, b.need("group", method), -1)
    if not group.is_meta and bool((b.mask & (group < 0)).any()):
        raise ValueError(f"{method}: TokenBatch.group is negative on a token of the mask")
    out = torch.full((*group.shape[:-1], b.n_responses), -1, device=group.device)
    return out.scatter_reduce(-1, torch.where(b.mask, b.response, 0), group, "amax")


def rewards(b: TokenBatch, method: str) -> Tensor:
    """The reward of each response `[..., n_responses]`, float64; 0 for an absent one."""
    sums = response_sums(b, on_mask(b, b.need("reward", method).detach()).double())
    return sums / response_lengths(b).clamp(min=1)


def group_sums(
    batches: Iterable[tuple[TokenBatch, Tensor]], method: str, reduce: Reduce | None = None
) -> Tensor:
    """Sums `[..., K, G]` over each group of numbers `[..., K, n_responses]` of responses.

    G is a power of two above the largest group of any rank; 0 where a group has no response.
    """
    parts = [(group_of(b, method), x.double()) for b, x in batches]
    bits = torch.zeros(64, dtype=torch.int64, device=parts[0][1].device)
    for group, _ in parts:
        bits[int(group.max()).bit_length() if group.numel() and int(group.max()) > 0 else 0] = 1
    size = 1 << int(summed([bits], reduce).nonzero().max())
    return summed((_scattered(group, x, size) for group, x in parts), reduce)


def _scattered(group: Tensor, x: Tensor, size: int) -> Tensor:
    there = (group >= 0).unsqueeze(-2)
    index = group.clamp(min=0).unsqueeze(-2).expand(x.shape)
    out = torch.zeros(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    return out.scatter_add(-1, index, torch.where(there, x, 0))


def of_group(b: TokenBatch, x: Tensor, method: str) -> Tensor:
    """Hand each token the number `[..., G]` of its group: `[..., N]`, 0 where masked."""
    index = torch.where(b.mask, b.need("group", method), 0)
    return on_mask(b, x.gather(-1, index))
