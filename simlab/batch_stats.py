"""Whole-batch statistics: per-response sums, mismatch measures, advantages, reduced diagnostics.

Everything here is computed once for the optimizer batch, across micro-batches and ranks, and handed
to the loss as a number. `reduce` is the caller's sum over ranks (a torch.distributed all-reduce, or
nothing); integer counts go through it, so the answer does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.quantile import Reduce, abs_quantile
from simlab.tokens import TokenBatch, log_ratio, widen


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
    reduce = reduce or (lambda counts: counts)
    batches = list(batches)
    return {
        "tokens": reduce(sum(b.mask.sum(-1) for b in batches)),
        "responses": reduce(sum((response_lengths(b) > 0).sum(-1) for b in batches)),
    }


def mismatch(b: TokenBatch) -> dict[str, Tensor]:
    """How far pi is from mu on the sampled tokens; all `[...]`, over active tokens, no gradient.

    - `d_bar` = mean |d| in nats, SAT (52); `d_mean` = mean d (signed);
      `d_q50 .. d_max` = inverse-CDF quantiles of |d|; `d_kurtosis` = E(d-Ed)^4 / Var(d)^2.
    - `k1` = mean(-d), `k2` = mean(d^2)/2, `k3` = mean(r - 1 - d): estimators of KL(mu || pi).
    - `ess` = (sum r)^2 / (n sum r^2), a fraction in (0, 1], 1 when on-policy, scale-free.
    - `chi2` = mean(r^2) - 1, per token.
    With no active token every value is 0 and `tokens` says so. Finite input: `screen` first.
    """
    d = log_ratio(b).detach()
    n = b.mask.sum(-1)
    some = n.clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return torch.where(b.mask, x, 0).sum(-1) / some

    size = d.abs().amax(-1) if d.shape[-1] else d.sum(-1)
    centred = d - mean(d).unsqueeze(-1)
    sd = mean(centred**2).sqrt()
    spread = sd > 4 * torch.finfo(d.dtype).eps * size  # equal gaps differ by rounding only
    z = centred / torch.where(spread, sd, 1).unsqueeze(-1)
    floor = torch.where(b.mask, d, -torch.inf)
    log_ess = (
        2 * torch.logsumexp(floor, -1) - torch.logsumexp(2 * floor, -1) - some.to(d.dtype).log()
    )
    stats = {
        "tokens": n,
        "d_bar": mean(d.abs()),
        "d_mean": mean(d),
        "d_max": size,
        "d_kurtosis": torch.where(spread, mean(z**4), 0),
        "k1": mean(-d),
        "k2": mean(d**2) / 2,
        "k3": mean(torch.expm1(d) - d),
        "ess": torch.where(n > 0, log_ess.exp(), 0),
        "chi2": mean(torch.expm1(2 * d)),
    }
    for level in (50, 90, 99):
        stats[f"d_q{level}"] = abs_quantile([(d, b.mask)], level / 100)
    return stats


# ---------------------------------------------------------------- advantages
def group_advantage(reward: Tensor, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """GRPO: (R - mean) / (std + eps) within each group; reward and answer are `[..., G]`.

    `ddof=1` is what verl, TRL and slime compute. A group of one and a group of equal rewards get 0.
    """
    centred = reward - reward.mean(-1, keepdim=True)
    size = reward.shape[-1]
    std = (centred.pow(2).sum(-1, keepdim=True) / max(size - ddof, 1)).sqrt()
    return torch.where(flat_groups(reward).unsqueeze(-1), 0.0, centred / (std + eps))


def flat_groups(reward: Tensor) -> Tensor:
    """Groups whose answers all got one reward, which teach nothing: bool `[...]` from `[..., G]`."""
    return (reward == reward[..., :1]).all(-1)


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
