"""OBRS: S = sg[w] A log pi on accepted tokens, w = min(Z max(r, lam), cap), r = pi/mu, 0 on the others.

Source: Jackpot (2602.06107), optimal budgeted rejection sampling, from notes; its cap and lam were not read.

A token is accepted where its `uniform` lies below a = min(1, r / lam); what is accepted follows
P = min(mu, pi / lam) / Z, and w = pi / P makes up for the rest. lam >= max r gives P = pi, w = 1 and a share 1 / lam
of accepted tokens. Z = sum_v min(mu_v, pi_v / lam) of the token's state is formed from mu's top tokens, the
sampled one and one bucket for the rest, times kappa = the mean of a over the mean of that sum, over the whole
batch (`calibrate`), which makes up for the bucket. The paper joins the top tokens of both policies, and
trains a separate rollout model with further losses, which are not here. Rejected tokens stay in the denominator.

Gradient weight on grad log pi: w A, 0 where rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import (
    Diagnostic,
    Surrogate,
    TokenBatch,
    log_ratio,
    on_mask,
    ratio,
    weighted,
)
from simlab.stabilizers.parts import Above0

Lam = Annotated[float, Interval("(0, inf)")]


def acceptance(b: TokenBatch, lam: float) -> tuple[Tensor, Tensor, Tensor]:
    """r, a and the approximate Z of each token `[..., N]`."""
    r = ratio(log_ratio(b).detach())
    sums = []
    for sampled, name in ((b.logp.detach(), "topk"), (b.logp_mu, "topk_mu")):
        top = torch.where(
            b.mask.unsqueeze(-1), b.need(name, "obrs").detach().to(b.dtype), -torch.inf
        )
        named = torch.cat([top, on_mask(b, sampled).unsqueeze(-1)], -1).exp()
        sums.append(torch.cat([named, (1 - named.sum(-1, keepdim=True)).clamp(min=0)], -1))
    pi, mu = sums
    return r, (r / lam).clamp(max=1), mu.minimum(pi / lam).sum(-1)


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    lam: Lam = 1.0,
    calibrate: bool = True,
    reduce: Reduce | None = None,
) -> dict[str, Tensor | float]:
    """{"kappa": `[...]`}; 1 without `calibrate` or without tokens."""
    if not calibrate:
        return {"kappa": 1.0}
    sums = []
    for b in batches:
        _, a, Z = acceptance(b, lam)
        sums.append(torch.stack([torch.where(b.mask, x, 0).double().sum(-1) for x in (a, Z)]))
    a, Z = summed(sums, reduce)
    return {"kappa": torch.where(Z > 0, a / torch.where(Z > 0, Z, 1), 1)}


def surrogate(
    b: TokenBatch, *, kappa: Tensor | float, lam: Lam = 1.0, cap: Above0 = torch.inf
) -> Surrogate:
    """OBRS given kappa `[...]`. Needs `uniform`, `topk` and `topk_mu`."""
    r, a, Z = acceptance(b, lam)
    accepted = b.need("uniform", "obrs") < a
    Z = Z * torch.as_tensor(kappa, dtype=Z.dtype, device=Z.device).unsqueeze(-1)
    w = Z * r.clamp(min=lam)
    shown = {"accepted": Diagnostic(accepted, "mean"), "capped": Diagnostic(w > cap, "mean")}
    w = torch.where(accepted, w.clamp(max=cap), 0.0)
    return weighted(b, w * on_mask(b, b.advantage), shown)
