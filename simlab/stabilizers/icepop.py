"""IcePop: S = M(k) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/pi_old, k = pi_old/mu.

Source: Ring-1T (2510.18855); Ling-2.6 (2606.15079) eq. (5); SAT (42).

    M(k) = k if low <= k <= high else 0      (weighted, the formula)
    M(k) = 1 if low <= k <= high else 0      (binary, the common simplification)

pi_old is `logp_prox`: the trainer at the rollout's weights in the formula, the trainer just before
the step in frameworks that recompute it.

Frameworks disagree on the ratio that the band tests: pi_old/mu (AReaL, the formula) or pi/mu (rllm).
`band="total"` tests pi/mu; the weight stays pi_old/mu, so that no factor is applied twice.
Band [.5, 5] here; [.5, 2] and [.2, 5] are also in use. k carries no gradient.

Gradient weight on grad log pi: M(k) r A, 0 where the clip binds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio


def check_band(method: str, low: float, high: float) -> None:
    """Raises ValueError unless 0 <= low <= high, high > 0."""
    if not 0 <= low <= high or high == 0:
        raise ValueError(
            f"{method}: the band needs 0 <= low <= high and high > 0, got {low}, {high}"
        )


def in_band(d: Tensor, low: float, high: float) -> Tensor:
    """low <= exp(d) <= high, tested on the log-ratio, where a limit is not a matter of rounding."""
    return (d >= (math.log(low) if low else -math.inf)) & (d <= math.log(high))


def surrogate(
    b: TokenBatch,
    *,
    low: float = 0.5,
    high: float = 5.0,
    weighted: bool = True,
    band: str = "mismatch",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Needs `logp_prox`. Both ends of the band are inclusive."""
    check_radii("icepop", eps_low, eps_high)
    check_band("icepop", low, high)
    if band not in ("mismatch", "total"):
        raise ValueError(f"icepop: band must be mismatch or total, got {band!r}")
    prox = b.need("logp_prox", "icepop").detach()
    k = log_ratio(b, num=prox)
    inside = in_band(k if band == "mismatch" else log_ratio(b).detach(), low, high)
    W = torch.where(inside, ratio(k) if weighted else 1.0, 0.0)
    u, A = log_ratio(b, den=prox), on_mask(b, b.advantage)
    S, active, diagnostics = clipped(u, A, 1 - eps_low, 1 + eps_high, W)
    return Surrogate(S, active, diagnostics | {"out_of_band": Diagnostic(~inside, "mean")})
