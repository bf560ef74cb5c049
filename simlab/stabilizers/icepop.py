"""IcePop: PPO's clip on pi/pi_old times a two-sided band on the engine ratio k = pi_old/mu.

Ring-1T (2510.18855) and Ling-2.6 (2606.15079) eq. (5); SAT (42).
    S = M(k) min(r A, clip(r, 1-eps_low, 1+eps_high) A),  r = pi/pi_old
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

from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio


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
    """Needs `logp_prox`. Both ends of the band are inclusive and tested on the log-ratio."""
    check_radii("icepop", eps_low, eps_high)
    if not 0 < low <= high < math.inf:
        raise ValueError(f"icepop: the band needs 0 < low <= high < inf, got {low}, {high}")
    if band not in ("mismatch", "total"):
        raise ValueError(f"icepop: band must be mismatch or total, got {band!r}")
    prox = b.need("logp_prox", "icepop").detach()
    A, k = on_mask(b, b.advantage), log_ratio(b, num=prox)
    tested = k if band == "mismatch" else log_ratio(b).detach()
    inside = (tested >= math.log(low)) & (tested <= math.log(high))
    S, active, diagnostics = clipped(log_ratio(b, den=prox), A, 1 - eps_low, 1 + eps_high)
    weight = ratio(k) if weighted else 1.0
    diagnostics["out_of_band"] = Diagnostic(b.mask & ~inside, "mean")
    return Surrogate(torch.where(inside, weight * S, 0.0), active & inside, diagnostics)
