"""Decoupled PPO: S = w min(u A, clip(u, 1 - eps_low, 1 + eps_high) A), u = pi/prox, w from k = prox/mu.

Source: Hilton et al. 2021 (2110.00641); AReaL (2505.24298); A-3PO (2512.06547).

The proximal policy `proximal` is
    batch       `logp_prox`, whatever the caller hands in
    step        `logp_prox`, recomputed just before the step       (these three tell the
    rollout     `logp_prox`, the trainer at the rollout's weights   trainer which one to
    ewma        `logp_prox`, an EWMA of the trainer's weights       hand in; core/state.py)
    mu          mu itself (bypass: u = pi/mu and k = 1)
    loglinear   log prox = a log mu + (1 - a) log pi
    arithmetic  prox = a mu + (1 - a) pi
with a = `mix`, or 1/age (A-3PO; 1 at age 0). An interpolated prox only moves the limits of the total
ratio pi/mu: loglinear to (1 -+ eps)^(1/a), arithmetic to (1 -+ eps) a / (1 - (1 -+ eps)(1 - a)).

`weight` cap: w = clip(k, low, high), mask: w = k if low <= k <= high else 0, none: w = 1. AReaL caps
k at 5; PPO-EWMA's code caps the total ratio pi/mu at 100, which this does not do. `dual_clip` as in PPO. No gradient flows through prox or w.

Gradient weight on grad log pi: w u A, 0 where the clip binds.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio
from simlab.stabilizers.parts import (
    BandHigh,
    BandLow,
    DualClip,
    RadiusHigh,
    RadiusLow,
    Share,
    check_band,
    clipped,
    in_band,
)

Proximal = Literal["batch", "step", "rollout", "ewma", "mu", "loglinear", "arithmetic"]


def proximal_log_prob(b: TokenBatch, proximal: Proximal, mix: float | None) -> Tensor:
    """log prox `[..., N]` in nats, without gradient; anything where masked."""
    if proximal == "mu":
        return b.logp_mu.detach()
    if proximal not in ("loglinear", "arithmetic"):
        return b.need("logp_prox", "decoupled").detach()
    pi, mu = b.logp.detach().to(b.dtype), b.logp_mu.to(b.dtype)
    if mix is None:
        a = 1 / b.need("age", "decoupled").clamp(min=1).to(pi.dtype)
    else:
        a = torch.full_like(pi, mix)
    if proximal == "arithmetic":
        return torch.logaddexp(a.log() + mu, (-a).log1p() + pi)
    return a * mu + (1 - a) * pi


def surrogate(
    b: TokenBatch,
    *,
    proximal: Proximal = "batch",
    mix: Share | None = None,
    weight: Literal["cap", "mask", "none"] = "cap",
    low: BandLow = 0.0,
    high: BandHigh = 5.0,
    dual_clip: DualClip = None,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Raises ValueError for low above high, or a missing `logp_prox` or `age`."""
    check_band("decoupled", low, high)
    prox = proximal_log_prob(b, proximal, mix)
    d = log_ratio(b, num=prox)
    k, inside = ratio(d), in_band(d, low, high)
    w = {"cap": k.clamp(low, high), "mask": torch.where(inside, k, 0.0), "none": None}[weight]
    u, A = log_ratio(b, den=prox), on_mask(b, b.advantage)
    S, active, shares = clipped(u, A, 1 - eps_low, 1 + eps_high, w, dual_clip)
    return Surrogate(S, active, shares | {"out_of_band": Diagnostic(~inside, "mean")})
