"""Two-factor correction: S = W(k) min(u A, clip(u, 1 - eps_low, 1 + eps_high) A), u = pi/pi_old, k = pi_old/mu.

Source: "Missing old logits" (2605.12070), from notes; its band constant c is not known to us.

The total ratio pi/mu = u k holds two things: k, what the engine does to the trainer's own policy of the
rollout (repaired by a symmetric band [1/c, c]), and u, how far training has moved since (clipped
on the side of the advantage). pi_old is `logp_prox`, the TRAINER at the rollout's version; any other
proximal policy mixes the two factors again. `repair` mask: W = k inside and 0 outside, clamp:
W = clip(k, 1/c, c).

`untouched` reports the share that neither factor touches; the paper's EWMA of the weights is reset
where it falls below .9 (across_steps.py).

Gradient weight on grad log pi: W u A, 0 where the clip binds.
"""

from __future__ import annotations

import torch

from simlab.stabilizers.icepop import in_band
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio


def surrogate(
    b: TokenBatch,
    *,
    c: float = 5.0,
    repair: str = "mask",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Needs `logp_prox`. Raises ValueError for impossible values."""
    check_radii("two_factor", eps_low, eps_high)
    if not 1 <= c < torch.inf:
        raise ValueError(f"two_factor: c must be at least 1 and finite, got {c}")
    if repair not in ("mask", "clamp"):
        raise ValueError(f"two_factor: repair must be mask or clamp, got {repair!r}")
    prox = b.need("logp_prox", "two_factor").detach()
    d = log_ratio(b, num=prox)
    k, inside = ratio(d), in_band(d.abs(), 1, c)
    W = torch.where(inside, k, 0.0) if repair == "mask" else k.clamp(1 / c, c)
    u, A = log_ratio(b, den=prox), on_mask(b, b.advantage)
    S, active, shares = clipped(u, A, 1 - eps_low, 1 + eps_high, W)
    clips = shares["clip_high"].value | shares["clip_low"].value
    shown = {"out_of_band": ~inside, "untouched": inside & ~clips}
    return Surrogate(S, active, shares | {k: Diagnostic(x, "mean") for k, x in shown.items()})
