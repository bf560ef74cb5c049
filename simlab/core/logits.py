"""From logits to the log-prob of given tokens, entropy and Gini index, a few rows at a time.

With z = logits / temperature, p = softmax(z) over the last axis and y the given token,

    logp = z_y - log sum_j exp(z_j)            d logp / d z_j = [j = y] - p_j
    H    = - sum_j p_j log p_j                 d H / d z_j    = -p_j (log p_j + H)
    gini = 1 - sum_j p_j^2                     no gradient

`head` asks for the log-probs of K more tokens of each row, by the first formula.

The forward keeps a shift and sum_j exp(z_j - shift) of each row. The backward forms p from them
again, block by block, inside the gradient that it returns. No other tensor is as large as the
logits, and a block stays in the cache while it is worked on.

The shift need not be the largest z: any logit of the row will do that is not far below it. The given
token or one of the first columns mostly is, so that a pass to find the largest is spent only on rows
where they are not. A row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simlab.core.tokens import widen

BLOCK_BYTES = 512 << 10  # for each CPU thread: logits and two buffers fit the cache of a core
DEVICE_BLOCK_BYTES = 32 << 20  # elsewhere: larger caches, and a launch for every operation
FIRST = 1024  # columns that are looked at for a shift
# A sum of exp(z - shift) above this is done again from the largest z. It must not overflow when
# squared, any vocabulary must fit below, and log(sum) must stay small where the entropy, a difference
# of two numbers of that size, is small: one rounding of a number below 16 is 5e-7 in float32.
SAFE = 2.0**23
FLOOR = -1000.0  # exp is 0 from here down in every dtype; 0 * FLOOR is 0 where 0 * -inf is NaN


class VocabShard(NamedTuple):
    """Where this rank's columns start in the vocabulary, and how its ranks reduce numbers.

    A reducer takes a float tensor of a few numbers a row and returns it reduced elementwise over the ranks that share the vocabulary, in place or not: a torch.distributed all-reduce.
    """

    start: int  # token id of the first column
    reduce_max: Callable[[Tensor], Tensor]
    reduce_sum: Callable[[Tensor], Tensor]


class TokenScores(NamedTuple):
    """What `token_log_probs` returns, `[...]` each."""

    logp: Tensor  # nats
    entropy: Tensor | None  # nats
    gini: Tensor | None  # 1 - sum p^2, in [0, 1)
    head: Tensor | None = None  # nats [..., K], log-probs of the tokens of `head`


def token_log_probs(
    logits: Tensor,
    token: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    gini: bool = False,
    head: Tensor | None = None,
    parallel: VocabShard | None = None,
) -> TokenScores:
    """log p(token) in nats and, on request, entropy and Gini index of p = softmax(logits / temperature).

    `logits` is `[..., V]` of any float dtype and any strides (it is never copied), `token` `[...]`
    int64. Returns `[...]` each, float64 for float64 logits and float32 for all others. Log-prob and
    entropy carry a gradient, in the dtype of the logits; the Gini index carries none. A second
    derivative is a RuntimeError. torch.compile leaves the call as it is, by a break of the graph.

    A logit of -inf is a token that cannot be drawn: p = 0, nothing added to entropy or Gini index,
    no gradient. If it is the given token, logp is -inf and the gradient is still the formula's, 1 on
    that token and -p on the others. A row of nothing but -inf is no distribution and gives NaN, but
    no gradient unless one is asked of it.

    `head` `[..., K]` int64 are more tokens of each row, whose log-probs are returned with their gradient
    (`TokenBatch.topk`). A token of -1 is none: its log-prob is -inf and has no gradient, as the place of
    the given token in a head asks. The other numbers are the same bits with a head and without.

    `parallel`: the logits hold columns [start, start + V) of a vocabulary that is split over ranks.
    Token ids stay global; every rank gets the numbers of the whole vocabulary and the gradient of
    its own columns, from the same upstream gradient on every rank. Communication is one maximum and
    one sum a call, five numbers a row (and K with a head), and nothing in the backward. A token that
    no rank holds has logp -inf.

    Raises ValueError for a temperature that is not finite and above 0, for shapes or dtypes that do
    not fit and, without `parallel`, for a token outside [0, V).
    """
    if torch.compiler.is_compiling():  # tracing would unroll the loop over blocks
        as_it_is: Any = torch.compiler.disable(token_log_probs)
        return as_it_is(
            logits, token, temperature=temperature, entropy=entropy, gini=gini, head=head,
            parallel=parallel,
        )  # fmt: skip
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be finite and above 0, got {temperature}")
    if not logits.is_floating_point() or token.dtype != torch.int64:
        raise ValueError(
            f"logits must be float and token int64, got {logits.dtype} and {token.dtype}"
        )
    if logits.dim() == 0 or logits.shape[:-1] != token.shape:
        raise ValueError(
            f"logits must be [..., V] and token [...], got {tuple(logits.shape)} and "
            f"{tuple(token.shape)}"
        )
    if head is not None and (head.dtype != torch.int64 or head.shape[:-1] != token.shape):
        raise ValueError(
            f"head must be int64 [..., K] with token [...], got {head.dtype} {tuple(head.shape)} and "
            f"{tuple(token.shape)}"
        )
    if parallel is None:
        _check_range("token", token, 0, logits.shape[-1])
        if head is not None:
            _check_range("head", head, -1, logits.shape[-1])
    asked = token.unsqueeze(-1) if head is None else torch.cat([token.unsqueeze(-1), head], -1)
    logp, H, index = _Scores.apply(logits, asked, 1 / temperature, entropy, gini, parallel)
    return TokenScores(logp[..., 0], H, index, None if head is None else logp[..., 1:])


def _check_range(name: str, x: Tensor, low: int, end: int) -> None:
    """Raises ValueError unless all of x lies in [low, end)."""
    if x.numel():
        smallest, largest = torch.stack(x.aminmax()).tolist()
        if smallest < low or largest >= end:
            wrong = smallest if smallest < low else largest
            raise ValueError(f"{name} must lie in [{low}, {end}), got {wrong}")


class _Scores(torch.autograd.Function):
    """The formulas above; `scale` is 1 / temperature, numbers of the rows are flat, `[R, 1]`, and those of
    the J asked tokens of a row, the given one first, `[R, J]`."""

    @staticmethod
    def forward(ctx, logits, asked, scale, entropy, gini, shard):
        V, J = logits.shape[-1], asked.shape[-1]
        column = asked - (shard.start if shard else 0)
        known = (asked >= 0).reshape(-1, J)
        owned = ((column >= 0) & (column < V)).reshape(-1, J) & known  # by this rank
        column = column.clamp(0, V - 1)
        chosen = widen(logits.gather(-1, column)).reshape(-1, J)
        column = column.reshape(-1, J)
        shift = torch.maximum(chosen[:, :1], _largest(logits[..., :FIRST]).reshape(-1, 1))
        sums = _row_sums(logits, shift, scale, entropy, gini)
        if shard is not None or J > 1:
            chosen = torch.where(owned, chosen, -torch.inf)
        if shard is not None:
            shift, chosen, sums = _over_ranks(shift, chosen, sums, scale, shard)
        total, weighted, squares = sums
        logp = (chosen - shift) * scale - total.log()
        H = (total.log() - weighted / total).clamp(min=0) if entropy else None
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, column, known, owned, shift, total, H)
        index = 1 - squares / total / total if gini else None
        rest = [None if x is None else x.view(asked.shape[:-1]) for x in (H, index)]
        outputs = [logp.view(asked.shape), *rest]
        if gini:
            ctx.mark_non_differentiable(outputs[2])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy, _):
        if torch.is_grad_enabled():  # create_graph: the shift and the sum would pass for constants
            raise RuntimeError("token_log_probs has no second derivative")
        logits, column, known, owned, shift, total, H = ctx.saved_tensors
        scale, V = ctx.scale, logits.shape[-1]
        if grad_logp is None:
            each = torch.zeros_like(column, dtype=total.dtype)
        else:
            each = torch.where(known, grad_logp.reshape(column.shape), 0)
        g = each.sum(-1, keepdim=True)
        h = torch.zeros_like(total) if grad_entropy is None else grad_entropy.reshape(-1, 1)
        # scale ([j = y] g - p_j (g + h (log p_j + H))), with p = exp(z) / total, z from the shift
        factor = -scale / total
        constant = factor * g
        if grad_entropy is not None:
            constant, slope = factor * (g + h * (H - total.log())), factor * h
        on_token = torch.where(owned, scale * each, 0)
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat, in_place = out.view(-1, V), out.dtype == total.dtype
        rows = _block_rows(logits)
        buffers = (grad_entropy is not None) + (not in_place)
        work = total.new_empty(buffers, min(rows, len(total)), V)
        for span, x in _blocks(logits, rows):
            z = _shifted(x, shift[span], scale, flat[span] if in_place else work[-1, : len(x)])
            if grad_entropy is None:
                z.exp_().mul_(constant[span])
            else:
                e = torch.exp(z.clamp_(min=FLOOR), out=work[0, : len(x)])
                torch.addcmul(constant[span], z, slope[span], out=z).mul_(e)
            z.scatter_add_(1, column[span], on_token[span])
            if not in_place:
                flat[span] = z
        silent = (each == 0).all(-1, keepdim=True) & (h == 0)
        flat[(silent & ~(total > 0)).view(-1)] = 0  # NaN that nobody asked for
        return out, None, None, None, None, None


def _row_sums(logits: Tensor, shift: Tensor, scale: float, entropy: bool, gini: bool) -> Tensor:
    """Sums of e, e log e and e^2 over each row `[3, R, 1]`, where e = exp((logit - shift) scale).

    The last two are 0 unless asked for. A shift that is too low is replaced by the largest logit.
    """
    sums, rows = shift.new_zeros(3, len(shift), 1), _block_rows(logits)
    work = shift.new_empty(1 + entropy, min(rows, len(shift)), logits.shape[-1])

    def sum_block(span: slice, x: Tensor) -> None:
        z, e = _shifted(x, shift[span], scale, work[0, : len(x)]), work[-1, : len(x)]
        torch.exp(z.clamp_(min=FLOOR) if entropy else z, out=e)
        torch.sum(e, -1, keepdim=True, out=sums[0, span])
        if entropy:
            torch.sum(z.mul_(e), -1, keepdim=True, out=sums[1, span])
        if gini:
            torch.sum(e.square_(), -1, keepdim=True, out=sums[2, span])

    for span, x in _blocks(logits, rows):
        sum_block(span, x)
    low = ~(sums[0] <= SAFE)  # NaN too: a shift of -inf
    if low.any():
        for span, x in _blocks(logits, rows):
            if low[span].any():
                shift[span] = torch.where(low[span], _largest(x), shift[span])
                sum_block(span, x)
    return sums


def _over_ranks(
    shift: Tensor, chosen: Tensor, sums: Tensor, scale: float, shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, given token's logit and sums of the whole vocabulary, from those of this rank."""
    both = shard.reduce_max(torch.cat([shift, chosen], -1))
    highest, chosen = both.split([1, chosen.shape[-1]], -1)
    total, weighted, squares = torch.where(shift == -torch.inf, 0, sums)  # nothing to draw here
    gap = ((shift - highest) * scale).clamp(min=FLOOR)
    sums = torch.stack([total, weighted + gap * total, squares * gap.exp()]) * gap.exp()
    return highest, chosen, shard.reduce_sum(sums)


def _largest(logits: Tensor) -> Tensor:
    """Largest logit of each row `[..., 1]`, in at least float32."""
    return widen(logits.amax(-1, keepdim=True))


def _shifted(x: Tensor, shift: Tensor, scale: float, out: Tensor) -> Tensor:
    """(x - shift) scale, written to `out`, which may be wider."""
    torch.sub(x if x.dtype == out.dtype else out.copy_(x), shift, out=out)
    return out if scale == 1 else out.mul_(scale)


def _blocks(logits: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Views `[<= rows, V]` of the logits, each with its place among all rows; nothing is copied."""
    parts, at = [logits], 0
    while parts[0].dim() > 2 and not parts[0].is_contiguous():  # a slice of a batch, say
        parts = [inner for part in parts for inner in part]
    for part in parts:
        for x in part.reshape(-1, logits.shape[-1]).split(rows):
            yield slice(at, at + len(x)), x
            at += len(x)


def _block_rows(logits: Tensor) -> int:
    """Rows of a block."""
    on_cpu = logits.device.type == "cpu"
    budget = BLOCK_BYTES * torch.get_num_threads() if on_cpu else DEVICE_BLOCK_BYTES
    return max(budget // (max(logits.element_size(), 4) * logits.shape[-1]), 1)
