"""ESTR: S = 1[d^2 / (H + eps) <= tau] min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/mu.

Source: entropy-scaled trust regions (2607.22186), from notes; eps 0.01 from one of them.

H is the entropy of mu at the token's state: noise of equal size in the logits moves an uncertain token
further. `source` says where H comes from:
    mu       mu itself (`entropy_mu`), which a simulator knows and an engine does not
    trainer  the trainer's entropy (`entropy_prox`) at the weights of `logp_prox`: those of the rollout with
             proximal = "rollout", those before the step with "step"; it does not see the engine's noise
    head     mu's head (`topk_mu`), the sampled token and one bucket for the rest: at most H
 For iid logit noise E d^2 is proportional to the Gini index 1 - sum mu^2, not
to H; `scale="gini"` is that exact form, of `gini_mu` or of the head.

tau has no published value. Unless given, it is the (1 - rate)-quantile of the score over the active
tokens of the whole batch, which masks a share `rate` of them.

Gradient weight on grad log pi: r A inside, 0 outside the region or where the clip binds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.head import head_uncertainty
from simlab.core.quantile import Reduce, abs_quantile
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import AtLeast0, RadiusHigh, RadiusLow, clipped

Scale = Literal["entropy", "gini"]
Eps = Annotated[float, Interval("(0, inf)")]
Source = Literal["mu", "trainer", "head"]
FIELD = {
    ("entropy", "mu"): "entropy_mu",
    ("gini", "mu"): "gini_mu",
    ("entropy", "trainer"): "entropy_prox",
}


def uncertainty(b: TokenBatch, scale: str, source: str) -> Tensor:
    """H, or the Gini index, `[..., N]`, 0 where masked. Raises ValueError for a Gini index of the trainer."""
    if source == "head":
        return head_uncertainty(b, "estr", scale)
    if (scale, source) not in FIELD:
        raise ValueError(f"estr: scale {scale} has no source {source}, choose mu or head")
    return on_mask(b, b.need(FIELD[scale, source], "estr"))


def score(b: TokenBatch, scale: str, source: str, eps: float) -> Tensor:
    """d^2 / (H + eps) `[..., N]`, 0 where masked."""
    return log_ratio(b).detach() ** 2 / (uncertainty(b, scale, source) + eps)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    tau: AtLeast0 | None = None,
    rate: Annotated[float, Interval("[0, 1)")] = 0.02,
    scale: Scale = "entropy",
    source: Source = "mu",
    eps: Eps = 0.01,
    reduce: Reduce | None = None,
) -> dict[str, Tensor | float]:
    """{"limit": tau}, or the quantile `[...]` that masks a share `rate`."""
    if tau is not None:
        return {"limit": tau}
    shards = [(score(b, scale, source, eps), b.mask) for b in batches]
    return {"limit": abs_quantile(shards, round(1 - rate, 12), reduce)}


def surrogate(
    b: TokenBatch,
    *,
    limit: Tensor | float,
    scale: Scale = "entropy",
    source: Source = "mu",
    eps: Eps = 0.01,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """ESTR given the limit `[...]`, inclusive. Needs the field of its scale and source."""
    d = log_ratio(b)
    limit = torch.as_tensor(limit, dtype=d.dtype, device=d.device).unsqueeze(-1)
    inside = score(b, scale, source, eps) <= limit
    A = on_mask(b, b.advantage)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, inside.to(d.dtype))
    shown = {"out_of_band": Diagnostic(~inside, "mean"), "limit": Diagnostic(limit, "max")}
    return Surrogate(S, active, shares | shown)
