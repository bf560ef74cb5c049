"""Exact order statistics of a batch that lies in micro-batches and on ranks, and M2PO's moment bound.

Everything is decided on counts, which add up over micro-batches and, through `reduce`, over ranks:
the answer does not depend on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TypeVar

import numpy as np  # comes with torch
import torch
from torch import Tensor

from simlab.core.tokens import widen

Reduce = Callable[[Tensor], Tensor | None]  # a sum over ranks: `summed`
Count = TypeVar("Count", int, Tensor)
CHUNK = 1 << 16  # entries worked on at a time: they stay in the cache
LONG, STRIDE = 1 << 16, 61  # from this length on, a sample narrows an order statistic down


def summed(parts: Iterable[Tensor], reduce: Reduce | None = None) -> Tensor:
    """The sum over the micro-batches of this rank and, through `reduce`, over ranks.

    `reduce` returns the sum of its tensor over ranks, or writes it into the tensor and returns None,
    as `torch.distributed.all_reduce` does. Every whole-batch number of a method goes through here.
    """
    total = sum(parts)  # 0 + part: no caller's tensor is written to
    total = total if isinstance(total, Tensor) else torch.as_tensor(total)
    over_ranks = reduce(total) if reduce else None
    return total if over_ranks is None else over_ranks


def rank(alpha: float, n: Count) -> Count:
    """k = ceil(alpha n) in exact arithmetic, alpha read as a decimal (0.55 of 100 is 55, not 56)."""
    part = Fraction(str(alpha)).limit_denominator(10**9)  # n times it fits into 64 bits
    if not 0 < part <= 1:
        raise ValueError(f"alpha must lie in (0, 1], got {alpha}")
    return -(-n * part.numerator // part.denominator)


Shards = Iterable[tuple[Tensor, Tensor]]  # pairs (x [..., N_i], mask [..., N_i])


def abs_quantile(shards: Shards, alpha: float, reduce: Reduce | None = None) -> Tensor:
    """The k-th smallest |x| over active entries, k = ceil(alpha n): SAT (14), no interpolation.

    `shards` are the micro-batches of this rank, with the same leading axes; `reduce` sums an integer
    tensor over ranks. Returns `[...]` in the (widened) dtype of x; 0 where no entry is active
    anywhere. Exact for any count, ties and empty shards.
    """
    return order_statistic(shards, lambda n: rank(alpha, n), reduce)


def order_statistic(
    shards: Shards, k: Tensor | Callable[[Tensor], Tensor], reduce: Reduce | None = None
) -> Tensor:
    """The k-th smallest |x| `[...]` over active entries, 0 where k = 0; k `[...]`, int64, may be given
    as a function of the count of active entries."""
    flat, lead = _lanes(shards)
    counts = (m.count_nonzero() if len(m) == 1 else m.sum(-1) for _, m in flat)
    n = summed(counts, reduce).reshape(-1)
    k = (k(n.reshape(lead)) if callable(k) else k).reshape(-1)
    if reduce is None and k.device.type == "cpu":
        rows = [(x.numpy(), m.numpy()) for x, m in flat]
        found = None
        if sum(x.shape[-1] for x, _ in rows) < LONG:
            found = _sorted(rows, k.numpy())
        elif len(k) == 1:
            lane = [(x[0], m[0]) for x, m in rows]
            found = _narrowed(lane, int(k), int(n)) if int(n) else 0.0
        if found is not None:
            return torch.as_tensor(found, device=k.device).to(flat[0][0]).reshape(lead)
    return _radix(flat, k, reduce).reshape(lead)


def _sorted(flat: list, k: np.ndarray) -> np.ndarray:
    """The k-th smallest |x| of each short lane. numpy sorts with vectors, the fastest way here."""
    size = np.concatenate([np.where(m, np.abs(x), np.inf) for x, m in flat], -1)
    if not size.shape[-1]:
        return np.zeros(len(k))
    at = np.take_along_axis(np.sort(size, -1), np.maximum(k - 1, 0)[:, None], -1)[:, 0]
    return np.where(k > 0, at, 0)


def _narrowed(flat: list, k: int, n: int) -> float | None:
    """The k-th smallest |x| of one long lane, or None where the sample misled.

    A sample of every STRIDE-th entry brackets the answer at four standard errors; one pass counts
    what lies below and keeps the few per cent between. numpy compresses and sorts with vectors.
    """
    sample = np.sort(np.concatenate([np.abs(x[::STRIDE])[m[::STRIDE]] for x, m in flat]))
    at, margin = k * len(sample) // n, 2 * math.isqrt(len(sample)) + 1
    low = sample[at - margin] if at >= margin else 0
    high = sample[at + margin] if at + margin < len(sample) else np.inf
    below, inside = 0, []
    for x, m in flat:
        for i in range(0, len(x), CHUNK):
            part, keep = np.abs(x[i : i + CHUNK]), m[i : i + CHUNK]
            under = part < low
            below += np.count_nonzero(under & keep)
            inside.append(part[keep & ~under & (part <= high)])
    inside = np.sort(np.concatenate(inside))
    return inside[k - below - 1] if below < k <= below + len(inside) else None


def _radix(flat: list, k: Tensor, reduce: Reduce | None) -> Tensor:
    """The k-th smallest |x| of each lane `[lanes]`.

    The bit pattern of a non-negative float grows with its value, so histograms of its digits, highest
    first, find the order statistic. float32 takes two reductions of up to 65,536 bins on one lane
    (four of 256 when many small lanes share the call). Ranks are integers throughout.
    """
    lanes, dtype = len(k), flat[0][0].dtype
    bits = 16 if lanes == 1 else 8
    word, width = (torch.int64, 64) if dtype == torch.float64 else (torch.int32, 32)
    left = k
    prefix = torch.zeros(lanes, dtype=word, device=k.device)
    for shift in range(width - bits, -1, -bits):
        digit_bits = min(bits, width - 1 - shift)  # there is no sign
        counts = summed((_digits(x, m, prefix, shift, digit_bits) for x, m in flat), reduce)
        cumulative = counts.cumsum(-1)
        digit = (cumulative < left.unsqueeze(-1)).sum(-1).clamp(max=counts.shape[-1] - 1)
        left = left - (cumulative - counts).gather(-1, digit.unsqueeze(-1)).squeeze(-1)
        prefix = (prefix << digit_bits) | digit.to(word)
    return torch.where(k > 0, prefix, 0).view(dtype)


def moment_bound(
    shards: Shards, budget: float, reduce: Reduce | None = None, remove: bool = False
) -> Tensor:
    """The largest |x| with mean(min(x^2, bound^2)) <= budget over active entries: M2PO's tau `[...]`.
    With `remove` the mean is that of x^2 over the entries up to the bound: the others leave it.

    inf where the mean of x^2 keeps the budget (or nothing is active), 0 where no entry does. Sums are
    kept in float64, so that micro-batches and ranks (through `reduce`) change nothing but rounding.
    """
    shards = list(shards)
    flat, lead = _lanes(shards)
    dtype, n = flat[0][0].dtype, summed((m.sum(-1) for _, m in flat), reduce)
    squares, n = [torch.where(m, x, 0).double() ** 2 for x, m in flat], n.double()
    kept = summed((x.sum(-1) for x in squares), reduce) <= budget * n
    if reduce is None and n.device.type == "cpu" and sum(x.shape[-1] for x, _ in flat) < LONG:
        tau = _bound_by_sorting(flat, budget, n, remove)
        return torch.where(kept, torch.inf, tau).reshape(lead)
    # bisect on the bit pattern, which grows with the value; 31 or 63 rounds of two sums
    word, width = (torch.int64, 64) if dtype == torch.float64 else (torch.int32, 32)
    low = torch.zeros(len(n), dtype=torch.int64, device=n.device)
    for bit in range(width - 2, -1, -1):
        tried = low | (1 << bit)
        bound = tried.to(word).view(dtype).double().unsqueeze(-1)
        if remove:
            inside = [m & (x <= bound**2) for x, (_, m) in zip(squares, flat, strict=True)]
            kept_squares = (
                torch.where(i, x, 0).sum(-1) for x, i in zip(squares, inside, strict=True)
            )
            total = summed(kept_squares, reduce)
            left = summed((i.sum(-1) for i in inside), reduce)
            fits = bound.isfinite().squeeze(-1) & (total <= budget * left.double())
        else:
            total = summed((x.minimum(bound**2).sum(-1) for x in squares), reduce)
            fits = total <= budget * n  # NaN and inf patterns never pass
        low = torch.where(fits, tried, low)
    bound = low.to(word).view(dtype).unsqueeze(-1)
    k = summed(((m & (x.abs() <= bound)).sum(-1) for x, m in flat), reduce)
    tau = order_statistic(shards, k.reshape(lead), reduce)
    return torch.where(kept.reshape(lead), torch.inf, tau)


def _bound_by_sorting(flat: list, budget: float, n: Tensor, remove: bool) -> Tensor:
    """`moment_bound` of short lanes, 0 where no entry keeps the budget: a sum for every entry at once."""
    size = torch.cat([torch.where(m, x.abs(), torch.inf) for x, m in flat], -1).sort(-1).values
    square = size.double() ** 2
    count = torch.arange(1, size.shape[-1] + 1, device=n.device)
    total = torch.where(square.isfinite(), square, 0).cumsum(-1)
    if remove:
        after = torch.cat([size[:, 1:], torch.full_like(size[:, :1], torch.nan)], -1)
        fits = (total <= budget * count.double()) & (
            size != after
        )  # equal ones stay or go together
    else:
        fits = total + (n.unsqueeze(-1) - count) * square <= budget * n.unsqueeze(-1)
    fits &= (count <= n.unsqueeze(-1)) & size.isfinite()
    return torch.where(fits, size, 0).amax(-1) if size.shape[-1] else size.sum(-1)


def _lanes(shards: Shards) -> tuple[list[tuple[Tensor, Tensor]], torch.Size]:
    """Shards as [lanes, N_i] in one dtype, without gradient; and the leading axes."""
    pairs = [(widen(x.detach()), mask) for x, mask in shards]
    if not pairs:
        raise ValueError("a whole-batch number needs at least one shard (it may be empty)")
    lead = pairs[0][0].shape[:-1]
    lanes = math.prod(lead)
    return [(x.reshape(lanes, x.shape[-1]), m.reshape(lanes, m.shape[-1])) for x, m in pairs], lead


def _digits(x: Tensor, mask: Tensor, prefix: Tensor, shift: int, bits: int) -> Tensor:
    """Counts `[lanes, 2**bits]` of the digit at `shift` among active entries that match `prefix`.

    In chunks that stay in the cache, so that no temporary grows with the batch.
    """
    lanes, bins = x.shape[0], 1 << bits
    largest = torch.iinfo(prefix.dtype).max  # the sign bit goes: this is |x|
    top = 1 << (shift + bits) > largest  # nothing to match yet
    above = largest & -(1 << (shift + bits))
    match = (prefix << (shift + bits)).unsqueeze(-1)
    base = torch.arange(lanes, dtype=prefix.dtype, device=x.device).unsqueeze(-1) * bins
    total = torch.zeros(lanes * bins + 1, dtype=torch.int64, device=x.device)  # last: not counted
    step = max(CHUNK // max(lanes, 1), 1)
    for part, keep in zip(x.split(step, -1), mask.split(step, -1), strict=True):
        word = part.view(prefix.dtype)
        keep = keep if top else keep & ((word & above) == match)
        if lanes == 1 and not top:
            slot = (word[keep] >> shift) & (bins - 1)  # few are left
        else:
            slot = (word >> shift) & ((largest >> shift) & (bins - 1))
            slot = slot if lanes == 1 else slot + base
            whole = keep.count_nonzero() == keep.numel()
            slot = slot if whole else torch.where(keep, slot, lanes * bins)
        total += torch.bincount(slot.flatten(), minlength=lanes * bins + 1)
    return total[:-1].view(lanes, bins)
