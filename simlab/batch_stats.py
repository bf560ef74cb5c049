"""Whole-batch statistics: the exact quantile, per-response sums, mismatch measures, advantages.

Everything here is computed once for the optimizer batch, across micro-batches and ranks, and handed
to the loss as a number. `reduce` is the caller's sum over ranks (a torch.distributed all-reduce, or
nothing); integer counts go through it, so the answer does not depend on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import torch
from torch import Tensor

from simlab.tokens import TokenBatch, log_ratio, widen

Reduce = Callable[[Tensor], Tensor]
CHUNK = 1 << 18


# ---------------------------------------------------------------- the quantile
def rank(alpha: float, n: int) -> int:
    """k = ceil(alpha n) in exact arithmetic, alpha read as a decimal (.55 of 100 is 55, not 56)."""
    part = Fraction(str(alpha))
    if not 0 < part <= 1:
        raise ValueError(f"alpha must lie in (0, 1], got {alpha}")
    return -(-n * part.numerator // part.denominator)


def abs_quantile(
    shards: Iterable[tuple[Tensor, Tensor]], alpha: float, reduce: Reduce | None = None
) -> Tensor:
    """The k-th smallest |x| over active entries, k = ceil(alpha n): SAT (14), no interpolation.

    `shards` are pairs (x `[..., N_i]`, mask `[..., N_i]`), the micro-batches of this rank, with the
    same leading axes; `reduce` sums an integer tensor over ranks. Returns `[...]` in the (widened)
    dtype of x; 0 where no entry is active anywhere. Exact for any count, ties and empty shards.

    Radix selection: the bit pattern of a non-negative float grows with its value, so histograms of
    its digits, highest first, find the order statistic. float32 takes two reductions of 65,536 bins
    on one lane (four of 256 when many small lanes share the call). Ranks are integers throughout.
    """
    shards = [(x.detach(), mask) for x, mask in shards]
    if not shards:
        raise ValueError("abs_quantile needs at least one shard (it may be empty)")
    reduce = reduce or (lambda counts: counts)
    first = shards[0][0]
    lead, dtype = first.shape[:-1], first.dtype
    if dtype != torch.float64:
        dtype = torch.float32
    word, width = (torch.int64, 64) if dtype == torch.float64 else (torch.int32, 32)
    lanes = math.prod(lead)
    flat = [(x.reshape(lanes, x.shape[-1]), m.reshape(lanes, m.shape[-1])) for x, m in shards]
    bits = 16 if lanes == 1 else 8
    n = reduce(sum(m.count_nonzero(-1) for _, m in flat))
    k = torch.tensor([rank(alpha, c) for c in n.tolist()], dtype=torch.int64, device=n.device)
    prefix = torch.zeros(lanes, dtype=word, device=n.device)
    for shift in range(width - bits, -1, -bits):
        counts = reduce(sum(_digits(x, m, prefix, shift, bits, dtype) for x, m in flat))
        cumulative = counts.cumsum(-1)
        digit = (cumulative < k.unsqueeze(-1)).sum(-1).clamp(max=(1 << bits) - 1)
        k = k - (cumulative - counts).gather(-1, digit.unsqueeze(-1)).squeeze(-1)
        prefix = (prefix << bits) | digit.to(word)
    q = torch.where(n > 0, prefix, 0).view(dtype)
    return q.reshape(lead)


def _digits(
    x: Tensor, mask: Tensor, prefix: Tensor, shift: int, bits: int, dtype: torch.dtype
) -> Tensor:
    """Counts `[lanes, 2**bits]` of the digit at `shift` among active entries that match `prefix`.

    In chunks, so that the working memory does not grow with the batch.
    """
    lanes, bins = x.shape[0], 1 << bits
    top = shift + bits == torch.iinfo(prefix.dtype).bits  # nothing to match yet
    base = torch.arange(lanes, dtype=prefix.dtype, device=x.device).unsqueeze(-1) * bins
    total = torch.zeros(lanes * bins, dtype=torch.int64, device=x.device)
    step = max(CHUNK // max(lanes, 1), 1)
    for x_part, mask_part in zip(x.split(step, -1), mask.split(step, -1), strict=True):
        word = x_part.to(dtype).view(prefix.dtype) & torch.iinfo(prefix.dtype).max  # of |x|
        high = word >> shift
        keep = mask_part if top else mask_part & ((high >> bits) == prefix.unsqueeze(-1))
        slot = high & (bins - 1)
        if lanes == 1:
            slot = slot.squeeze(0) if keep.all() else slot[keep]
            total += torch.bincount(slot, minlength=bins)
        else:  # many short lanes: one histogram, with a last bin for what is not kept
            slot = torch.where(keep, slot + base, lanes * bins)
            total += torch.bincount(slot.flatten(), minlength=lanes * bins + 1)[:-1]
    return total.view(lanes, bins)


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


def response_means(b: TokenBatch, x: Tensor) -> Tensor:
    """Mean of x over each response, handed back to its tokens: `[..., N]`. Whole responses only."""
    means = response_sums(b, x) / response_lengths(b).clamp(min=1)
    return to_tokens(b, means)


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
    for name, (value, how) in diagnostics.items():
        value = widen(value.detach()).expand(b.mask.shape)
        if how == "mean":
            out[name] = torch.where(b.mask, value, 0).sum(-1) / b.mask.sum(-1).clamp(min=1)
        else:
            sign = -1 if how == "min" else 1
            lowest = torch.full_like(some, -torch.inf, dtype=value.dtype).unsqueeze(-1)
            held = torch.where(b.mask, sign * value, lowest)
            out[name] = torch.where(some, sign * torch.cat([held, lowest], -1).amax(-1), 0)
    return out
