"""TIS: S = sg[min(k, C)] min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi/pi_old, k = pi_old/mu.

Source: truncated importance sampling, Yao et al. 2025 (blog); SAT (41); sequence level: "When speed
kills stability" (blog).

Two forms are in use: the one above (`form="ppo"`; verl, slime, TRL), which needs `logp_prox` for
pi_old, the trainer at the rollout's weights or just before the step; and

    form="pg"   S = sg[min(r, C)] A log pi,  r = pi/mu           (41)

At level "sequence" the product of the ratio over the response replaces it in the cap: unbiased but
for the cap, and of high variance; its C is 2 to 10. C is 2 in verl, 3 in TRL 1.16 (whose default mode
is not TIS but the sequence mask of mis.py), 5 in Qwen's formulation.

Gradient weight on grad log pi: min(k, C) r A, 0 where the clip binds; form "pg" min(r, C) A. A
capped token keeps its gradient.
"""

from __future__ import annotations

from torch import Tensor

from simlab.batch_stats import response_sums, to_tokens
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio, weighted


def sequence_log_ratio(b: TokenBatch, d: Tensor) -> Tensor:
    """The sum of d over the response, on each of its tokens `[..., N]`; no gradient."""
    return to_tokens(b, response_sums(b, d.detach()))


def surrogate(
    b: TokenBatch,
    *,
    cap: float = 2.0,
    form: str = "ppo",
    level: str = "token",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Raises ValueError for cap <= 0, an unknown form or level, or a missing `logp_prox`."""
    check_radii("tis", eps_low, eps_high)
    if not cap > 0:
        raise ValueError(f"tis: cap must be above 0, got {cap}")
    if form not in ("ppo", "pg"):
        raise ValueError(f"tis: form must be ppo or pg, got {form!r}")
    if level not in ("token", "sequence"):
        raise ValueError(f"tis: level must be token or sequence, got {level!r}")
    A, prox = on_mask(b, b.advantage), None
    if form == "ppo":
        prox = b.need("logp_prox", "tis").detach()
    k = log_ratio(b, num=prox).detach()
    W = ratio(sequence_log_ratio(b, k) if level == "sequence" else k)
    shown = {"capped": Diagnostic(W > cap, "mean")}
    W = W.clamp(max=cap)
    if form == "pg":
        return weighted(b, W * A, shown)
    out = clipped(log_ratio(b, den=prox), A, 1 - eps_low, 1 + eps_high, W)
    return Surrogate(out.S, out.active, out.diagnostics | shown)
