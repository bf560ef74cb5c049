"""GEPO: S = w A, w = exp(mean_t log pi_t) / E, E = sum q^2 / sum q over the group, q = exp(mean_t log mu_t).

Source: group expectation policy optimization (2508.17850) eq. (2), through a port. Not the entropy-based GEPO (2607.16850).

The denominator is the q-weighted mean of q over the responses to a prompt, which varies less than a response's own q;
nothing is clipped. At pi = mu the weights do not average 1: biased by design. In a group of one E = q, which
is GSPO without its clip. Mean log-probs are held above -340 nats in E.

Gradient weight on token t: (1/T) sum over the response of w A.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
from torch import Tensor

from simlab.core.per_group import group_sums, of_group
from simlab.core.per_response import response_lengths, response_means, response_sums
from simlab.core.quantile import Reduce
from simlab.core.tokens import Surrogate, TokenBatch, on_mask
from simlab.stabilizers.parts import clipped, share_gradient

LOWEST = -340.0  # nats; the square of its exponential is still a number


def whole_batch(
    batches: Iterable[TokenBatch], *, reduce: Reduce | None = None
) -> dict[str, Tensor]:
    """{"log_e": log E of each group `[..., G]`} in nats, 0 for a group without responses."""
    parts = []
    for b in batches:
        T = response_lengths(b)
        mean = response_sums(b, on_mask(b, b.logp_mu.detach()).double()) / T.clamp(min=1)
        q = torch.where(T > 0, mean.clamp(min=LOWEST).exp(), 0)
        parts.append((b, torch.stack([q.square(), q], -2)))
    top, bottom = group_sums(parts, "gepo", reduce).unbind(-2)
    there = bottom > 0
    return {"log_e": torch.where(there, top, 1).log() - torch.where(there, bottom, 1).log()}


def surrogate(b: TokenBatch, *, log_e: Tensor) -> Surrogate:
    """GEPO given log E `[..., G]`. Needs `group`; whole responses only."""
    d = response_means(b, on_mask(b, b.logp)) - of_group(b, log_e, "gepo")
    S, active, shares = clipped(d, on_mask(b, b.advantage), 0, inf)
    return Surrogate(S, share_gradient(b, active, S), {"overflow": shares["overflow"]})
