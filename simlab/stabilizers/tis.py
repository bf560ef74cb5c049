"""TIS, truncated importance sampling: the engine ratio as a weight, capped at C.

Yao et al. 2025 (blog); SAT (41). Two forms are in use:
    form="ppo"  S = sg[min(pi_old/mu, C)] min(r A, clip(r, 1-eps_low, 1+eps_high) A),  r = pi/pi_old
    form="pg"   S = sg[min(pi/mu, C)] A log pi                                          (41)
The first (verl, slime, TRL; the default) needs `logp_prox` for pi_old, the trainer at the rollout's
weights or just before the step. C is 2 in verl and TRL, 5 in Qwen's formulation.

Gradient weight on grad log pi: min(pi_old/mu, C) r A, 0 where the clip binds; form "pg"
min(pi/mu, C) A. A capped token keeps its gradient.
"""

from __future__ import annotations

from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio


def surrogate(
    b: TokenBatch,
    *,
    cap: float = 2.0,
    form: str = "ppo",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Raises ValueError for cap <= 0, an unknown form, or a missing `logp_prox` (form "ppo")."""
    check_radii("tis", eps_low, eps_high)
    if not cap > 0:
        raise ValueError(f"tis: cap must be above 0, got {cap}")
    if form not in ("ppo", "pg"):
        raise ValueError(f"tis: form must be ppo or pg, got {form!r}")
    A = on_mask(b, b.advantage)
    if form == "pg":
        w = ratio(log_ratio(b).detach())
        S, active, diagnostics = A * on_mask(b, b.logp), A != 0, {}
    else:
        prox = b.need("logp_prox", "tis").detach()
        w = ratio(log_ratio(b, num=prox))
        S, active, diagnostics = clipped(log_ratio(b, den=prox), A, 1 - eps_low, 1 + eps_high)
    diagnostics["capped"] = Diagnostic(b.mask & (w > cap), "mean")
    return Surrogate(w.clamp(max=cap) * S, active, diagnostics)
