"""PPO clip: S = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/mu.

Source: Schulman et al. 2017 (1707.06347); SAT (11); asymmetric radii DAPO (2503.14476).

Dual clip (Ye et al. 2020, 1912.09729): for A < 0 the surrogate is held above c A, so that a huge
ratio on a bad token cannot blow up.

Gradient weight on grad log pi: r A, and 0 where the clip binds (A > 0 and r > 1 + eps_high, or A < 0
and r < 1 - eps_low, or A < 0 and r > c). A token exactly on a limit keeps its gradient.
"""

from __future__ import annotations

from torch import Tensor

from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.contraction import contracted
from simlab.stabilizers.parts import DualClip, RadiusHigh, RadiusLow, clipped


def surrogate(
    b: TokenBatch,
    *,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    dual_clip: DualClip = None,
    W: Tensor | None = None,
    shrink: Tensor | None = None,
) -> Surrogate:
    """PPO against the rollout policy; `dual_clip` is c, or None for none. W `[..., N]` multiplies S,
    `shrink` `[..., N]` the radii (`+contract`)."""
    d = log_ratio(b)
    if shrink is not None:
        return contracted(b, d, shrink < 1, shrink, eps_low, eps_high, W, dual_clip)
    return clipped(d, on_mask(b, b.advantage), 1 - eps_low, 1 + eps_high, W, dual_clip)
