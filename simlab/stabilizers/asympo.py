"""ASymPO: S = A log pi / sg[l], l = the mean -log pi of the response under the current policy.

Source: ASymPO (2606.03070), formula rebuilt from the abstract and notes.

No rollout log-prob is read. Each response's token loss is normalised by its own current scale, so that zero-sum advantages give
zero-sum losses however stale the responses. `floor` (nats) guards a near-deterministic response.

Gradient weight on grad log pi: A / l.
"""

from __future__ import annotations

from typing import Annotated

import torch

from simlab.core.arguments import Interval
from simlab.core.per_response import response_means
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, graded, on_mask


def surrogate(b: TokenBatch, *, floor: Annotated[float, Interval("(0, inf)")] = 1e-6) -> Surrogate:
    """Aggregate by seq_mean_token_mean."""
    A, logp = on_mask(b, b.advantage.detach()), on_mask(b, b.logp)
    scale = (-response_means(b, logp.detach())).clamp(min=floor)
    shown = {"scale_min": Diagnostic(scale, "min"), "scale_max": Diagnostic(scale, "max")}
    S = A * logp / scale
    return Surrogate(graded(S, S.clone(), torch.ones_like(S)), A != 0, shown)
