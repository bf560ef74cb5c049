"""SAT, staleness-adaptive trust region: PPO whose radius shrinks on the tail of |d|.

Yang et al. 2026 (2607.18722), equations (13)-(20). d = log(pi/mu), u = |sg d|,
q = the alpha-quantile of u over the active tokens of the optimizer batch (inverse CDF, (14)),

    c = 1 / (1 + (u/q)^2)  if q > 0 and u > q  else 1           (15), (16)
    S = min(r A, clip(r, 1 - eps_low c_-, 1 + eps_high c_+) A)    (17)-(19)

where c_+ is c for d > 0 and c_- is c for d < 0; the other end keeps PPO's radius. At level
"sequence" (20) the mean log-ratio of the response replaces d in both places (SAT-GSPO), while q
still ranges over tokens.

Gradient weight: r A (at level "sequence" the response mean of rho A, as GSPO), 0 where the
contracted clip binds. d, q and c are constants. q = 0 is PPO bit for bit.

The paper says "batch" in one place and "microbatch" in another; here q is an argument, computed by
`whole_batch` over whatever the caller hands in. The paper's runs use eps .2/.2 at both levels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.batch_stats import Reduce, abs_quantile, response_means
from simlab.stabilizers.gspo import share_gradient
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask

LEVELS = ("token", "sequence")


def score(b: TokenBatch, level: str) -> Tensor:
    """d `[..., N]` in nats: the token's log-ratio, or the mean log-ratio of its response."""
    if level not in LEVELS:
        raise ValueError(f"sat: level must be one of {', '.join(LEVELS)}, got {level!r}")
    d = log_ratio(b)
    return response_means(b, d) if level == "sequence" else d


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    alpha: float = 0.9,
    level: str = "token",
    reduce: Reduce | None = None,
) -> dict[str, Tensor]:
    """{"q": `[...]`} of (14), exact over micro-batches and, through `reduce`, over ranks."""
    if not 0 < alpha <= 1:
        raise ValueError(f"sat: alpha must lie in (0, 1], got {alpha}")
    shards = [(score(b, level), b.mask) for b in batches]
    return {"q": abs_quantile(shards, alpha, reduce)}


def surrogate(
    b: TokenBatch,
    *,
    q: Tensor | float,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    exponent: float = 2.0,
    factor: float | None = None,
    level: str = "token",
) -> Surrogate:
    """SAT given q `[...]`. `factor` replaces the kernel by one constant c in [0, 1] on gated tokens.

    Diagnostics are the five runtime quantities of the paper's Table 10: the mean contracted radii,
    the gate rate, the smallest c, and q. Raises ValueError for values outside these ranges.
    """
    check_radii("sat", eps_low, eps_high)
    if not exponent > 0:
        raise ValueError(f"sat: exponent must be above 0, got {exponent}")
    if factor is not None and not 0 <= factor <= 1:
        raise ValueError(f"sat: factor must lie in [0, 1], got {factor}")
    d, A = score(b, level), on_mask(b, b.advantage)
    q = torch.as_tensor(q, dtype=d.dtype, device=d.device).unsqueeze(-1)
    x = d.detach()
    gate = b.mask & (q > 0) & (x.abs() > q)
    c = factor if factor is not None else 1 / (1 + (x.abs() / torch.where(q > 0, q, 1)) ** exponent)
    up, down = gate & (x > 0), gate & (x < 0)
    # the ungated ends are PPO's own constants, so that a closed gate changes no bit
    high = torch.where(up, 1 + eps_high * c, torch.full_like(x, 1 + eps_high))
    low = torch.where(down, 1 - eps_low * c, torch.full_like(x, 1 - eps_low))
    S, active, diagnostics = clipped(d, A, low, high)
    if level == "sequence":
        active = share_gradient(b, active, A)
    c = torch.where(gate, c, torch.ones_like(x))
    diagnostics |= {
        "radius_low": Diagnostic(1 - low, "mean"),
        "radius_high": Diagnostic(high - 1, "mean"),
        "gate_rate": Diagnostic(gate, "mean"),
        "c_min": Diagnostic(c, "min"),
        "q": Diagnostic(q, "max"),
    }
    return Surrogate(S, active, diagnostics)
