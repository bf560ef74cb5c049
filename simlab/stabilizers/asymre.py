"""AsymRE: S = (R - mean_g R - delta) log pi, the mean over the responses to the same prompt.

Source: asymmetric REINFORCE (2506.20520), theory second-hand; delta -0.1 is the shift of Trinity's code.

No log-ratio at all. A negative delta lowers the baseline, so that successes weigh more than failures, which is what
keeps old data from pushing probabilities to zero. `advantage` is not read. A lone response has A = -delta by
the formula (`alone="formula"`); Trinity's code gives it the baseline 0 and no shift, A = R (`alone="reward"`).

Gradient weight on grad log pi: R - mean_g R - delta.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.per_group import group_sums, of_group, rewards
from simlab.core.per_response import response_lengths
from simlab.core.quantile import Reduce
from simlab.core.tokens import Surrogate, TokenBatch, on_mask, weighted


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    delta: Annotated[float, Interval("(-inf, inf)")] = -0.1,
    alone: Literal["formula", "reward"] = "formula",
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"level": the baseline of each group `[..., G]`}, delta included."""
    parts = [
        (b, torch.stack([rewards(b, "asymre"), (response_lengths(b) > 0).double()], -2))
        for b in batches
    ]
    total, n = group_sums(parts, "asymre", reduce).unbind(-2)
    level = total / n.clamp(min=1) + delta
    return {"level": torch.where(n == 1, 0.0, level) if alone == "reward" else level}


def surrogate(b: TokenBatch, *, level: Tensor) -> Surrogate:
    """AsymRE given the baselines `[..., G]`. Needs `reward` and `group`."""
    reward = on_mask(b, b.need("reward", "asymre").detach())
    return weighted(b, reward - of_group(b, level, "asymre"), {})
