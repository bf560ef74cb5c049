"""MIS: S = W(x) min(u A, clip(u, 1 - eps_low, 1 + eps_high) A), u = pi/pi_old, W rejects x out of band.

Source: masked importance sampling, "When speed kills stability" (blog); TRL, verl, slime.

With k = pi_old/mu (pi_old is `logp_prox`), x and the defaults are, by `level`,

    token      k                                band [.5, 2]         W = x inside
    sequence   product of k over the response   band [0, 2]          W = x inside
    geometric  exp(mean log k)                  band [.999, 1.001]   W = 1 inside

and W = 0 outside; `weighted` overrides whether the weight is x or 1. `veto` drops a response that has
one token with k below it (1e-4 in slime). Published C of the sequence level: 2 to 10. Rejected tokens
stay in the denominator, as in TRL; verl drops them from it, and its k1 limits bound mu/pi_old.

Gradient weight on grad log pi: W u A, 0 where the clip binds.
"""

from __future__ import annotations

import math

import torch

from simlab.batch_stats import response_means, response_sums, to_tokens
from simlab.stabilizers.icepop import check_band, in_band
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.stabilizers.tis import sequence_log_ratio
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio

BAND = {"token": (0.5, 2.0), "sequence": (0.0, 2.0), "geometric": (0.999, 1.001)}


def surrogate(
    b: TokenBatch,
    *,
    level: str = "token",
    low: float | None = None,
    high: float | None = None,
    weighted: bool | None = None,
    veto: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Needs `logp_prox`. None is the default of the level; both ends of the band are inclusive."""
    check_radii("mis", eps_low, eps_high)
    if level not in BAND:
        raise ValueError(f"mis: level must be {', '.join(BAND)}, got {level!r}")
    low, high = (a if x is None else x for x, a in zip((low, high), BAND[level], strict=True))
    check_band("mis", low, high)
    if veto is not None and not 0 < veto < 1:
        raise ValueError(f"mis: veto must lie in (0, 1), got {veto}")
    prox = b.need("logp_prox", "mis").detach()
    k = log_ratio(b, num=prox)
    x = k
    if level != "token":
        x = sequence_log_ratio(b, k) if level == "sequence" else response_means(b, k)
    keep = in_band(x, low, high)
    if veto is not None:
        bad = response_sums(b, (k < math.log(veto)).to(k.dtype))
        keep = keep & (to_tokens(b, bad) == 0)
    weighted = level != "geometric" if weighted is None else weighted
    W = torch.where(keep, ratio(x) if weighted else 1.0, 0.0).to(k.dtype)
    u, A = log_ratio(b, den=prox), on_mask(b, b.advantage)
    S, active, shares = clipped(u, A, 1 - eps_low, 1 + eps_high, W)
    return Surrogate(S, active, shares | {"rejected": Diagnostic(~keep, "mean")})
