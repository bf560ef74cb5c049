"""OPSM: S = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), 0 if A < 0 and mean_t(-d_t) > delta, r = pi/mu.

Source: off-policy sequence masking, DeepSeek-V3.2; slime (delta 1e-4).

A response that the policy has moved away from teaches nothing by its negative tokens; the mean is
over the response, A is the token's own. At level "sequence" A is the mean over the response instead,
and the response is dropped whole: the same unless advantages vary inside a response.

Gradient weight on grad log pi: r A, 0 where masked or where the clip binds.
"""

from __future__ import annotations

from simlab.core.per_response import response_means
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.statistics import log_of
from simlab.stabilizers.parts import AtLeast0, Level, RadiusHigh, RadiusLow, clipped


def correction(b: TokenBatch, *, delta: AtLeast0 = 1e-4, level: Level = "token") -> Correction:
    """rejects negative {level}s of a response whose mean of log mu - log pi is above {delta} nats"""
    A, d = on_mask(b, b.advantage), log_of(b, "r", "opsm")
    judged = response_means(b, A) if level == "sequence" else A
    dropped = (judged < 0) & (-response_means(b, d) > delta)
    return Correction("r", None, ~dropped, {"dropped": Diagnostic(dropped, "mean")})


def surrogate(
    b: TokenBatch,
    *,
    delta: AtLeast0 = 1e-4,
    level: Level = "token",
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """delta in nats a token."""
    c = correction(b, delta=delta, level=level)
    d, A = log_ratio(b), on_mask(b, b.advantage)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, c.W)
    return Surrogate(S, active, shares | c.diagnostics)
