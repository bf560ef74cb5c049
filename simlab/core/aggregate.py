"""Per-token surrogate -> (sum, count). The caller adds both over micro-batches and ranks, then divides.

Because sum and count travel apart, the loss and its gradient do not depend on the micro-batch size
(a mean of micro-batch means does). Except under `token_mean`, a micro-batch holds whole responses.

Each function maps S `[..., N]` to sum `[...]` (differentiable) and count `[...]` (int64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.core.per_response import response_lengths, to_tokens
from simlab.core.tokens import TokenBatch, widen


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


def token_sum(S: Tensor, b: TokenBatch) -> tuple[Tensor, Tensor]:
    """The sum over tokens, divided by nothing: the count is 0, and `mean` divides by 1. The step then
    grows with the batch (verl's token-sum)."""
    total, count = token_mean(S, b)
    return total, torch.zeros_like(count)


def mean(total: Tensor, count: Tensor) -> Tensor:
    """sum / count; the sum itself where nothing was counted, which is 0 in an empty batch."""
    return total / count.clamp(min=1)


def _responses(b: TokenBatch) -> Tensor:
    return (response_lengths(b) > 0).sum(-1)


AGGREGATIONS = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "token_mean": token_mean,
    "token_sum": token_sum,
}


# ---------------------------------------------------------------- diagnostics
def reduce_diagnostics(b: TokenBatch, diagnostics: dict) -> dict[str, Tensor]:
    """Reduce a stabilizer's per-token diagnostics over active tokens `[...]`, each by its own reducer.

    0 where no token is active.
    """
    out, some = {}, b.mask.any(-1)
    for name, diagnostic in diagnostics.items():
        how, value = diagnostic.reduce, widen(diagnostic.value.detach()).expand(b.mask.shape)
        if how == "mean":
            out[name] = torch.where(b.mask, value, 0).sum(-1) / b.mask.sum(-1).clamp(min=1)
        else:
            sign = -1 if how == "min" else 1
            lowest = torch.full_like(some, -torch.inf, dtype=value.dtype).unsqueeze(-1)
            held = torch.where(b.mask, sign * value, lowest)
            out[name] = torch.where(some, sign * torch.cat([held, lowest], -1).amax(-1), 0)
    return out
