"""PPO clip: S = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/mu.

Source: Schulman et al. 2017 (1707.06347); SAT (11); asymmetric radii DAPO (2503.14476).

Dual clip (Ye et al. 2020, 1912.09729): for A < 0 the surrogate is held above c A, so that a huge
ratio on a bad token cannot blow up.

Gradient weight on grad log pi: r A, and 0 where the clip binds (A > 0 and r > 1 + eps_high, or A < 0
and r < 1 - eps_low, or A < 0 and r > c). A token exactly on a limit keeps its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.tokens import (
    D_MAX,
    Diagnostic,
    Surrogate,
    TokenBatch,
    graded,
    log_ratio,
    on_mask,
    ratio,
)


def check_radii(method: str, eps_low: float, eps_high: float) -> None:
    """Raises ValueError unless 0 <= eps_low <= 1 and eps_high >= 0."""
    if not 0 <= eps_low <= 1:
        raise ValueError(f"{method}: eps_low must lie in [0, 1], got {eps_low}")
    if not 0 <= eps_high < float("inf"):
        raise ValueError(f"{method}: eps_high must be at least 0 and finite, got {eps_high}")


def clipped(
    d: Tensor,
    A: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    weight: Tensor | None = None,
    dual_clip: float | None = None,
) -> Surrogate:
    """weight min(r A, clip(r, low, high) A) for r = exp(d): the one clip of every method.

    Limits and weight (1 if not given, 0 drops a token) are constants: no gradient flows into them.
    Minimum and clip are vector instructions, selections are not; that is why there are few.
    """
    with torch.no_grad():
        r = ratio(d)
        plain = r * A
        S = plain.minimum(r.clamp(low, high).mul_(A))
        if dual_clip is not None:
            S = torch.where(A < 0, S.maximum(dual_clip * A), S)
        held = (S != plain) | (d > D_MAX)
        if weight is not None:
            S = S.mul_(weight)
        w = torch.where(held, 0.0, S)
    shares = {
        "clip_high": lambda: (A > 0) & (r > high),
        "clip_low": lambda: (A < 0) & (r < low),
        "overflow": lambda: d > D_MAX,
    }
    if dual_clip is not None:
        shares["clip_dual"] = lambda: (A < 0) & (r > dual_clip)
    diagnostics = {name: Diagnostic(share, "mean") for name, share in shares.items()}
    return Surrogate(graded(d, S, w), w != 0, diagnostics)


def surrogate(
    b: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> Surrogate:
    """PPO against the rollout policy; `dual_clip` is c > 1 or None. Raises ValueError otherwise."""
    check_radii("ppo", eps_low, eps_high)
    check_dual_clip("ppo", dual_clip)
    A = on_mask(b, b.advantage)
    return clipped(log_ratio(b), A, 1 - eps_low, 1 + eps_high, dual_clip=dual_clip)


def check_dual_clip(method: str, dual_clip: float | None) -> None:
    """Raises ValueError unless the cap is above 1 or not given."""
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"{method}: dual_clip must be above 1, got {dual_clip}")
