"""Decoupled PPO: S = w min(u A, clip(u, 1 - eps_low, 1 + eps_high) A), u = pi/prox, w from k = prox/mu.

Source: Hilton et al. 2021 (2110.00641); AReaL (2505.24298); A-3PO (2512.06547).

The proximal policy `proximal` is
    batch       `logp_prox`, whatever the caller hands in
    step        `logp_prox`, recomputed just before the step       (these three tell the
    rollout     `logp_prox`, the trainer at the rollout's weights   trainer which one to
    ewma        `logp_prox`, an EWMA of the trainer's weights       hand in; across_steps.py)
    loglinear   log prox = a log mu + (1 - a) log pi
    arithmetic  prox = a mu + (1 - a) pi
with a = `mix`, or 1/age (A-3PO; 1 at age 0). An interpolated prox only moves the limits of the total
ratio pi/mu: loglinear to (1 -+ eps)^(1/a), arithmetic to (1 -+ eps) a / (1 - (1 -+ eps)(1 - a)).

`weight` cap: w = clip(k, low, high), mask: w = k if low <= k <= high else 0, none: w = 1. AReaL caps
k at 5; PPO-EWMA's code caps the total ratio pi/mu at 100, which this does not do. `dual_clip` as in PPO. No gradient flows through prox or w.

Gradient weight on grad log pi: w u A, 0 where the clip binds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.stabilizers.icepop import check_band, in_band
from simlab.stabilizers.ppo import check_dual_clip, check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio, widen

HANDED_IN = ("batch", "step", "rollout", "ewma")
PROXIMAL = (*HANDED_IN, "loglinear", "arithmetic")


def proximal_log_prob(b: TokenBatch, proximal: str, mix: float | None) -> Tensor:
    """log prox `[..., N]` in nats, without gradient; anything where masked."""
    if proximal not in PROXIMAL:
        raise ValueError(f"decoupled: proximal must be {', '.join(PROXIMAL)}, got {proximal!r}")
    if mix is not None and not 0 <= mix <= 1:
        raise ValueError(f"decoupled: mix must lie in [0, 1], got {mix}")
    if proximal in HANDED_IN:
        return b.need("logp_prox", "decoupled").detach()
    pi, mu = widen(b.logp.detach()), widen(b.logp_mu)
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
    proximal: str = "batch",
    mix: float | None = None,
    weight: str = "cap",
    low: float = 0.0,
    high: float = 5.0,
    dual_clip: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Raises ValueError for impossible values, or a missing `logp_prox` or `age`."""
    check_radii("decoupled", eps_low, eps_high)
    check_dual_clip("decoupled", dual_clip)
    check_band("decoupled", low, high)
    if weight not in ("cap", "mask", "none"):
        raise ValueError(f"decoupled: weight must be cap, mask or none, got {weight!r}")
    prox = proximal_log_prob(b, proximal, mix)
    d = log_ratio(b, num=prox)
    k, inside = ratio(d), in_band(d, low, high)
    w = {"cap": k.clamp(low, high), "mask": torch.where(inside, k, 0.0), "none": None}[weight]
    u, A = log_ratio(b, den=prox), on_mask(b, b.advantage)
    S, active, shares = clipped(u, A, 1 - eps_low, 1 + eps_high, w, dual_clip)
    return Surrogate(S, active, shares | {"out_of_band": Diagnostic(~inside, "mean")})
