"""TRM: S = 1[D <= delta] min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), D the response's divergence from mu.

Source: trust region masking (2512.23075); verl PR #4544, whose preset is the mean of k3 up to 0.01.

D is the `reduce` (mean or max) over the response of k2 = x^2/2 or k3 = e^x - 1 - x. `anchor="prox"` is the
decoupled form of verl: x = log(prox/mu) and r = pi/prox (`logp_prox`); `anchor="current"` is its bypass: x = d and
r = pi/mu. The max hits long responses, the mean does not. A dropped response stays in the denominator;
verl drops it from there too.

Gradient weight on grad log pi: r A inside, 0 outside the region or where the clip binds.
"""

from __future__ import annotations

from typing import Literal

from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio
from simlab.stabilizers.algebra.statistics import reduced
from simlab.stabilizers.parts import AtLeast0, RadiusHigh, RadiusLow, clipped


def surrogate(
    b: TokenBatch,
    *,
    delta: AtLeast0 = 0.01,
    statistic: Literal["k2", "k3"] = "k3",
    reduce: Literal["mean", "max"] = "mean",
    anchor: Literal["prox", "current"] = "prox",
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Anchor "prox" needs `logp_prox`; delta in nats, inclusive."""
    tested = b.need("logp_prox", "trm") if anchor == "prox" else b.logp
    x = log_ratio(b, num=tested).detach()
    D = x.square() / 2 if statistic == "k2" else ratio(x) - 1 - x
    keep = reduced(b, D, reduce) <= delta
    d = log_ratio(b, den=tested) if anchor == "prox" else log_ratio(b)
    S, active, shares = clipped(
        d, on_mask(b, b.advantage), 1 - eps_low, 1 + eps_high, keep.to(d.dtype)
    )
    return Surrogate(S, active, shares | {"rejected": Diagnostic(~keep, "mean")})
