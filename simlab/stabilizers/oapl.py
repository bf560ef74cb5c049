"""OAPL: S = -(beta2 D - A*)^2 / T, D = sum_t d_t over the response, A* = R - beta1 log mean exp(R / beta1).

Source: 2602.19362, second-hand; loss and defaults from NeMo-RL PR #3825. The mean is over the responses to a prompt.

The log-ratio of the response is regressed on the advantage of a KL-regularised target: no importance weight, so any
lag is allowed, mu being the policy that drew. The square counts once, 1/T of it on each of T tokens.
`per_token` divides D by T. `advantage` is not read. beta1 to infinity is `regression` at level sequence with
tau = beta2, times 2 beta2. A lone response has A* = 0 and is only pulled to mu.

Gradient weight on grad log pi: 2 beta2 (A* - beta2 D), divided by T with `per_token`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.per_group import group_of, group_sums, of_group, rewards
from simlab.core.per_response import response_lengths, response_sums, to_tokens
from simlab.core.quantile import Reduce
from simlab.core.tokens import Surrogate, TokenBatch, graded, log_ratio, on_mask

LARGEST = 700.0  # of (R - mean R) / beta1


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    beta1: Annotated[float, Interval("[0.01, inf)")] = 1.0,
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"value": V of each group `[..., G]`}, in reward units."""
    given = [(b, rewards(b, "oapl"), (response_lengths(b) > 0).double()) for b in batches]
    sums = group_sums([(b, torch.stack([R, one], -2)) for b, R, one in given], "oapl", reduce)
    n = sums[..., 1, :].clamp(min=1)
    mean = sums[..., 0, :] / n
    parts = []
    for b, R, _ in given:
        own = mean.gather(-1, group_of(b, "oapl").clamp(min=0))
        parts.append((b, ((R - own) / beta1).clamp(max=LARGEST).exp().unsqueeze(-2)))
    total = group_sums(parts, "oapl", reduce).squeeze(-2)
    return {"value": mean + beta1 * torch.where(total > 0, total / n, 1).log()}


def surrogate(
    b: TokenBatch,
    *,
    value: Tensor,
    beta2: Annotated[float, Interval("(0, inf)")] = 1e-3,
    per_token: bool = False,
) -> Surrogate:
    """OAPL given V `[..., G]`. Needs `reward` and `group`."""
    A = on_mask(b, b.need("reward", "oapl").detach()) - of_group(b, value, "oapl")
    logp = on_mask(b, b.logp)
    T = on_mask(b, to_tokens(b, response_lengths(b)).clamp(min=1))
    with torch.no_grad():
        share = beta2 / T.clamp(min=1) if per_token else torch.full_like(T, beta2)
        gap = torch.where(b.mask, A - share * to_tokens(b, response_sums(b, log_ratio(b))), 0.0)
        S, w = -gap.square() / T.clamp(min=1), 2 * share * gap
    return Surrogate(graded(logp, S, w), w != 0, {})
