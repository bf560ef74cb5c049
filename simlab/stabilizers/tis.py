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

from typing import Literal

from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask, weighted
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.corrections import cap as capped
from simlab.stabilizers.algebra.statistics import WRITTEN
from simlab.stabilizers.parts import Above0, Level, RadiusHigh, RadiusLow, clipped


def correction(b: TokenBatch, *, cap: Above0 = 2.0, level: Level = "token") -> Correction:
    """W = k = prox/mu {level}, at most {cap}"""
    return capped(b, of="k", level=WRITTEN[level], max=cap)


def surrogate(
    b: TokenBatch,
    *,
    cap: Above0 = 2.0,
    form: Literal["ppo", "pg"] = "ppo",
    level: Level = "token",
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Form "ppo" needs `logp_prox`."""
    A = on_mask(b, b.advantage)
    if form == "pg":
        c = capped(b, of="r", level=WRITTEN[level], max=cap)
        return weighted(b, c.W * A, c.diagnostics)
    prox = b.need("logp_prox", "tis").detach()
    c = correction(b, cap=cap, level=level)
    S, active, shares = clipped(log_ratio(b, den=prox), A, 1 - eps_low, 1 + eps_high, c.W)
    return Surrogate(S, active, shares | c.diagnostics)
