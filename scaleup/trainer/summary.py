"""Loss and diagnostics of the whole batch, from what the loss recorded of each micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scaleup.trainer.reduce import batch_max, batch_sum
from simlab.core.tokens import TokenBatch


class Record(NamedTuple):
    """What the loss leaves of a micro-batch of N sampled tokens."""

    total: Tensor  # sum of the objective, KL term included; detached
    count: Tensor  # what it is divided by: tokens or responses
    b: TokenBatch  # with the log-probs of the loss, detached
    active: Tensor  # bool [N], tokens with a gradient from the stabilizer
    entropy: Tensor | None  # nats [N], where asked for
    diagnostics: dict[str, Tensor]  # numbers of this micro-batch
    reducers: dict[str, str]  # of diagnostics that are no mean over tokens: "min" or "max"
    screened: int  # non-finite numbers that were taken out of the mask


def summarize(records: list[Record]) -> tuple[float, dict[str, float]]:
    """(loss, numbers) of the whole batch, equal on every data-parallel rank; collective.

    The numbers are count, tokens, active and screened, which are sums, and the diagnostics.
    """
    tokens = [x.b.mask.sum() for x in records]
    sums = {"total": 0.0, "count": 0, "tokens": 0, "active": 0, "screened": 0}
    extremes: dict[str, Tensor] = {}  # largest values; of a minimum, with the sign turned
    means: dict[str, Tensor] = {}
    for x, n in zip(records, tokens, strict=True):
        sums["total"] += x.total.double()
        sums["count"] += x.count
        sums["tokens"] += n
        sums["active"] += x.active.sum()
        sums["screened"] += x.screened
        diagnostics = dict(x.diagnostics)
        if x.entropy is not None:
            inside = torch.where(x.b.mask, x.entropy, 0)
            diagnostics["entropy"] = inside.sum() / n.clamp(min=1)
        for name, value in diagnostics.items():
            reducer = x.reducers.get(name, "mean")
            if reducer == "mean":
                means[name] = means.get(name, 0) + value.double() * n
            else:
                sign = -1 if reducer == "min" else 1
                value = torch.where(n > 0, sign * value.double(), -torch.inf)
                extremes[name] = torch.maximum(extremes.get(name, value), value)
    device = tokens[0].device
    values = [torch.as_tensor(x, device=device).double() for x in (sums | means).values()]
    whole = dict(zip([*sums, *means], batch_sum(torch.stack(values)).tolist(), strict=True))
    n_tokens = max(whole["tokens"], 1)
    numbers = {name: whole.pop(name) / n_tokens for name in means}
    if extremes:
        tops = batch_max(torch.stack(list(extremes.values()))).tolist()
        signs = [-1 if records[0].reducers[name] == "min" else 1 for name in extremes]
        for name, sign, top in zip(extremes, signs, tops, strict=True):
            numbers[name] = sign * top if whole["tokens"] else 0.0
    loss = -whole.pop("total") / max(whole["count"], 1)
    return loss, numbers | whole
