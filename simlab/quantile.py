"""Exact order statistics of a batch that lies in micro-batches and on ranks, and M2PO's moment bound.

Everything is decided on counts, which add up over micro-batches and, through `reduce`, over ranks:
the answer does not depend on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np  # comes with torch
import torch
from torch import Tensor

from simlab.tokens import widen

Reduce = Callable[[Tensor], Tensor]
CHUNK = 1 << 16  # entries worked on at a time: they stay in the cache
LONG, STRIDE = 1 << 16, 61  # from this length on, a sample narrows an order statistic down


def rank(alpha: float, n: int | Tensor) -> int | Tensor:
    """k = ceil(alpha n) in exact arithmetic, alpha read as a decimal (.55 of 100 is 55, not 56)."""
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
    add = reduce or (lambda counts: counts)
    n = add(sum(m.count_nonzero() if len(m) == 1 else m.sum(-1) for _, m in flat)).reshape(-1)
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
            return torch.as_tensor(found).to(flat[0][0]).reshape(lead)
    return _radix(flat, k, add).reshape(lead)


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


def _radix(flat: list, k: Tensor, reduce: Reduce) -> Tensor:
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
        counts = reduce(sum(_digits(x, m, prefix, shift, digit_bits) for x, m in flat))
        cumulative = counts.cumsum(-1)
        digit = (cumulative < left.unsqueeze(-1)).sum(-1).clamp(max=counts.shape[-1] - 1)
        left = left - (cumulative - counts).gather(-1, digit.unsqueeze(-1)).squeeze(-1)
        prefix = (prefix << digit_bits) | digit.to(word)
    return torch.where(k > 0, prefix, 0).view(dtype)


def moment_bound(shards: Shards, budget: float, reduce: Reduce | None = None) -> Tensor:
    """The largest |x| with mean(min(x^2, bound^2)) <= budget over active entries: M2PO's tau `[...]`.

    inf where the mean of x^2 keeps the budget (or nothing is active), 0 where no entry does. Sums are
    kept in float64, so that micro-batches and ranks (through `reduce`) change nothing but rounding.
    """
    shards = list(shards)
    reduce = reduce or (lambda counts: counts)
    flat, lead = _lanes(shards)
    dtype, n = flat[0][0].dtype, reduce(sum(m.sum(-1) for _, m in flat))
    squares = [torch.where(m, x, 0).double() ** 2 for x, m in flat]
    kept = reduce(sum(x.sum(-1) for x in squares)) <= budget * n
    # bisect on the bit pattern, which grows with the value; 31 or 63 rounds of two sums
    word, width = (torch.int64, 64) if dtype == torch.float64 else (torch.int32, 32)
    low = torch.zeros(len(n), dtype=torch.int64, device=n.device)
    for bit in range(width - 2, -1, -1):
        tried = low | (1 << bit)
        bound = tried.to(word).view(dtype).double().unsqueeze(-1)
        total = reduce(sum(x.minimum(bound**2).sum(-1) for x in squares))
        low = torch.where(total <= budget * n, tried, low)  # NaN and inf patterns never pass
    bound = low.to(word).view(dtype).unsqueeze(-1)
    k = reduce(sum((m & (x.abs() <= bound)).sum(-1) for x, m in flat))
    tau = order_statistic(shards, k.reshape(lead), reduce)
    return torch.where(kept.reshape(lead), torch.inf, tau)


def _lanes(shards: Shards) -> tuple[list[tuple[Tensor, Tensor]], torch.Size]:
    """Shards as [lanes, N_i] in one dtype, without gradient; and the leading axes."""
    shards = [(widen(x.detach()), mask) for x, mask in shards]
    if not shards:
        raise ValueError("a whole-batch number needs at least one shard (it may be empty)")
    lead = shards[0][0].shape[:-1]
    lanes = math.prod(lead)
    return [tuple(x.reshape(lanes, x.shape[-1]) for x in pair) for pair in shards], lead


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
