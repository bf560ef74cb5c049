"""Per-token surrogate -> (sum, count). The caller adds both over micro-batches and ranks, then divides.

Because sum and count travel apart, the loss and its gradient do not depend on the micro-batch size
(a mean of micro-batch means does). Except under `token_mean`, a micro-batch holds whole responses.

Each function maps S `[..., N]` to sum `[...]` (differentiable) and count `[...]` (int64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.batch_stats import response_lengths, to_tokens
from simlab.tokens import TokenBatch


def token_mean(S: Tensor, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """Every active token weighs the same: sum S / number of tokens (DAPO, SAT)."""
    return torch.where(b.mask, S, 0).sum(-1), b.mask.sum(-1)


def seq_mean_token_mean(S: Tensor, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """Every response weighs the same: mean over responses of the mean over tokens (GRPO, GSPO)."""
    weight = to_tokens(b, 1 / response_lengths(b).clamp(min=1).to(S.dtype))
    return torch.where(b.mask, S * weight, 0).sum(-1), _responses(b)


def seq_mean_token_sum(S: Tensor, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """Mean over responses of the sum over tokens."""
    return torch.where(b.mask, S, 0).sum(-1), _responses(b)


def seq_mean_token_sum_norm(S: Tensor, b: TokenBatch, *, horizon: int) -> tuple[Tensor, Tensor]:
    """Mean over responses of (sum over tokens) / horizon, a constant (Dr. GRPO, DRPO)."""
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")
    total, count = seq_mean_token_sum(S, b)
    return total / horizon, count


def mean(total: Tensor, count: Tensor) -> Tensor:
    """sum / count, and 0 (with zero gradient) where nothing was counted."""
    return total / count.clamp(min=1)


def _responses(b: TokenBatch) -> Tensor:
    return (response_lengths(b) > 0).sum(-1)


AGGREGATIONS = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "token_mean": token_mean,
}
