"""SAT: S = min(r A, clip(r, 1 - eps_low c_-, 1 + eps_high c_+) A), a radius that shrinks on the tail.

Source: Yang et al. 2026 (2607.18722), equations (13)-(20).

d = log(pi/mu), u = |sg d|, q = the alpha-quantile of u over the active tokens of the optimizer batch
(inverse CDF, (14)), and

    c = 1 / (1 + (u/q)^2)  if q > 0 and u > q  else 1           (15), (16)

c_+ is c for d > 0 and c_- is c for d < 0; the other end keeps PPO's radius (17)-(19). At level
"sequence" (20) the mean log-ratio of the response replaces d in both places (SAT-GSPO), while q
still ranges over tokens.

Gradient weight: r A (at level "sequence" the response mean of rho A, as GSPO), 0 where the
contracted clip binds. d, q and c are constants. q = 0 is PPO bit for bit.

The paper says "batch" in one place and "microbatch" in another; here q is an argument, computed by
`whole_batch` over whatever the caller hands in. `ema` mixes in the q of the step before, for a
trainer that cannot afford a pass ahead of the step. The paper's runs use eps .2/.2 at both levels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from simlab.across_steps import ema as smooth
from simlab.batch_stats import response_means
from simlab.quantile import Reduce, abs_quantile
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
    ema: float = 0.0,
    reduce: Reduce | None = None,
    previous: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """{"q": `[...]`} of (14), exact over micro-batches and, through `reduce`, over ranks.

    With `ema` the answer is ema * (q of `previous`, the last step's answer) + (1 - ema) * q.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"sat: alpha must lie in (0, 1], got {alpha}")
    if not 0 <= ema < 1:
        raise ValueError(f"sat: ema must lie in [0, 1), got {ema}")
    q = abs_quantile([(score(b, level), b.mask) for b in batches], alpha, reduce)
    return {"q": smooth(previous and previous["q"], q, ema)}


def contracted(
    b: TokenBatch, d: Tensor, gate: Tensor, c: Tensor, eps_low: float, eps_high: float
) -> Surrogate:
    """PPO whose radius is c times as large on gated tokens, on the side of sign(d) only.

    `gate` is bool `[..., N]`, off where masked. Diagnostics are PPO's and the runtime quantities of
    the paper's Table 10: the mean contracted radii, the gate rate and the smallest c.
    """
    x = d.detach()
    # The end on the far side of 1 cannot bind, so one gate serves both ends; an ungated token gets
    # PPO's own constants, so that a closed gate changes no bit.
    one = c.new_ones(())
    low = torch.where(gate, torch.add(one, c, alpha=-eps_low), 1 - eps_low)
    high = torch.where(gate, torch.add(one, c, alpha=eps_high), 1 + eps_high)
    S, active, diagnostics = clipped(d, on_mask(b, b.advantage), low, high)
    diagnostics |= {
        "radius_low": Diagnostic(lambda: torch.where(x < 0, 1 - low, eps_low), "mean"),
        "radius_high": Diagnostic(lambda: torch.where(x > 0, high - 1, eps_high), "mean"),
        "gate_rate": Diagnostic(gate, "mean"),
        "c_min": Diagnostic(lambda: torch.where(gate, c, 1.0), "min"),
    }
    return Surrogate(S, active, diagnostics)


def kernel(method: str, u: Tensor, q: Tensor, exponent: float, factor: float | None) -> Tensor:
    """c = 1 / (1 + (u/q)^exponent) `[..., N]`, or the constant `factor`; read on gated tokens only.

    Raises ValueError unless exponent > 0 and factor, if given, lies in [0, 1].
    """
    if not exponent > 0:
        raise ValueError(f"{method}: exponent must be above 0, got {exponent}")
    if factor is None:
        return (u / q).pow_(exponent).add_(1).reciprocal_()
    if not 0 <= factor <= 1:
        raise ValueError(f"{method}: factor must lie in [0, 1], got {factor}")
    return torch.full_like(u, factor)


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

    Diagnostics are those of `contracted`, and q. Raises ValueError for values out of range.
    """
    check_radii("sat", eps_low, eps_high)
    d = score(b, level)
    u = d.detach().abs()
    q = torch.as_tensor(q, dtype=d.dtype, device=d.device).unsqueeze(-1)
    c = kernel("sat", u, q, exponent, factor)
    S, active, diagnostics = contracted(b, d, (q > 0) & (u > q), c, eps_low, eps_high)
    if level == "sequence":
        active = share_gradient(b, active, on_mask(b, b.advantage))
    return Surrogate(S, active, diagnostics | {"q": Diagnostic(q, "max")})
