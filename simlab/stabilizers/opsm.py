"""OPSM: S = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), 0 if A < 0 and mean_t(-d_t) > delta, r = pi/mu.

Source: off-policy sequence masking, DeepSeek-V3.2; slime (delta 1e-4).

A response that the policy has moved away from teaches nothing by its negative tokens; the mean is
over the response, A is the token's own.

Gradient weight on grad log pi: r A, 0 where masked or where the clip binds.
"""

from __future__ import annotations

from simlab.batch_stats import response_means
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask


def surrogate(
    b: TokenBatch, *, delta: float = 1e-4, eps_low: float = 0.2, eps_high: float = 0.2
) -> Surrogate:
    """delta in nats a token. Raises ValueError for impossible values."""
    check_radii("opsm", eps_low, eps_high)
    if not delta >= 0:
        raise ValueError(f"opsm: delta must be at least 0, got {delta}")
    d, A = log_ratio(b), on_mask(b, b.advantage)
    dropped = (A < 0) & (-response_means(b, d.detach()) > delta)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, (~dropped).to(d.dtype))
    return Surrogate(S, active, shares | {"dropped": Diagnostic(dropped, "mean")})
