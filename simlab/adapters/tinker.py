"""Tinker: any method through `forward_backward_custom`, which hands a loss all sequences and their log-probs.

    from simlab.adapters.tinker import loss_of
    loss = loss_of("sat", rollouts)     # one dict a datum: logp_mu, advantage, mask
    training_client.forward_backward_custom(data, loss).result()

The call has the whole optimizer batch, so numbers of the whole batch (SAT's q) are exact. If you cut the batch
into several calls, compute them once and pass them: `loss_of("sat", part, stats=stats_of("sat", logprobs, rollouts))`
with the log-probs of a forward pass. The loss is a sum over tokens; `count` divides it, for a mean over all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simlab.adapters.common import method, numbers
from simlab.core.tokens import TokenBatch

Rollout = Mapping[
    str, Any
]  # logp_mu, advantage and mask, a number a target token each (advantage: or one)
GIVEN = ("position", "logp_prox", "logp_ref", "age")


def batch(logprobs: Sequence[Tensor], rollouts: Sequence[Rollout]) -> TokenBatch:
    """One response a datum. Raises ValueError where the lengths do not agree."""
    if len(logprobs) != len(rollouts):
        raise ValueError(
            f"{len(logprobs)} data and {len(rollouts)} rollouts; there must be one each"
        )
    fields: dict[str, list[Tensor]] = {}
    for i, (x, rollout) in enumerate(zip(logprobs, rollouts, strict=True)):
        for name, value in rollout.items():
            y = torch.as_tensor(value, device=x.device)
            y = y.expand(len(x)) if y.dim() == 0 else y
            if len(y) != len(x):
                raise ValueError(f"datum {i}: {name} has {len(y)} numbers, its log-probs {len(x)}")
            fields.setdefault(name, []).append(y)
    starts = torch.tensor([0, *(len(x) for x in logprobs)]).cumsum(0)
    joined = {name: torch.cat(parts) for name, parts in fields.items()}
    return TokenBatch.from_packed(torch.cat(list(logprobs)), cu_seqlens=starts, **joined)


def stats_of(spec: str, logprobs: Sequence[Tensor], rollouts: Sequence[Rollout]) -> dict:
    """Numbers of the whole batch, to hand to every part of it."""
    chosen = method(spec, "Tinker", GIVEN, whole_batch=True)
    return chosen.stats([batch([x.detach() for x in logprobs], rollouts)])


def loss_of(
    spec: str, rollouts: Sequence[Rollout], *, stats: dict | None = None, count: float = 1.0
) -> Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]:
    """The method in the signature of Tinker's custom losses. Raises ValueError in one sentence."""
    chosen = method(spec, "Tinker", GIVEN, whole_batch=True)

    def loss(data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Minus the sum of S over `count`, and the method's diagnostics."""
        b = batch(logprobs, rollouts)
        out = chosen.surrogate(b, **(chosen.stats([b]) if stats is None else stats))
        return -out.S.sum() / count, {name: x.item() for name, x in numbers(b, out).items()}

    return loss
