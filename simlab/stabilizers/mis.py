"""MIS: S = W(x) min(u A, clip(u, 1 - eps_low, 1 + eps_high) A), u = pi/pi_old, W rejects x out of band.

Source: masked importance sampling, "When speed kills stability" (blog); TRL, verl, slime.

With k = pi_old/mu (pi_old is `logp_prox`), x and the defaults are, by `level`,

    token      k                                band [0.5, 2]         W = x inside
    sequence   product of k over the response   band [0, 2]          W = x inside
    geometric  exp(mean log k)                  band [0.999, 1.001]   W = 1 inside

and W = 0 outside; `weighted` overrides whether the weight is x or 1, and `weight` takes it from another
level than the criterion: `level="geometric", weight="sequence"` rejects by the geometric mean and
weighs by the product, with "token" by the token's own k (NeMo's seq-mask-tis). `veto` drops a response that has
one token with k below it (1e-4 in slime). Published C of the sequence level: 2 to 10. Rejected tokens
stay in the denominator, as in TRL; verl drops them from it, and its k1 limits bound mu/pi_old.

Gradient weight on grad log pi: W u A, 0 where the clip binds.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from simlab.core.arguments import Interval
from simlab.core.per_response import response_sums, to_tokens
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.algebra.statistics import WRITTEN, log_of, reduced
from simlab.stabilizers.parts import (
    BandHigh,
    BandLow,
    RadiusHigh,
    RadiusLow,
    check_band,
    clipped,
    in_band,
)

MisLevel = Literal["token", "sequence", "geometric"]
BAND = {"token": (0.5, 2.0), "sequence": (0.0, 2.0), "geometric": (0.999, 1.001)}
Veto = Annotated[float, Interval("(0, 1)")] | None


def correction(
    b: TokenBatch,
    *,
    level: MisLevel = "token",
    low: BandLow | None = None,
    high: BandHigh | None = None,
    weighted: bool | None = None,
    weight: MisLevel | None = None,
    veto: Veto = None,
) -> Correction:
    """rejects where k = prox/mu, {level}, is out of the band (low {low}, high {high}, veto {veto}); W is k there (weighted {weighted}, weight {weight}); None is the default of the level"""
    if weight is not None and weighted is False:
        raise ValueError("mis: weight says what to weigh by, so weighted cannot be false")
    low, high = (a if x is None else x for x, a in zip((low, high), BAND[level], strict=True))
    check_band("mis", low, high)
    k = log_of(b, "k", "mis")
    x = reduced(b, k, WRITTEN[level])
    keep = in_band(x, low, high)
    if veto is not None:
        bad = response_sums(b, (k < math.log(veto)).to(k.dtype))
        keep = keep & (to_tokens(b, bad) == 0)
    if weighted is None:
        weighted = level != "geometric" or weight is not None
    W = ratio(x if weight is None else reduced(b, k, WRITTEN[weight])) if weighted else None
    return Correction("k", W, keep, {"rejected": Diagnostic(~keep, "mean")})


def surrogate(
    b: TokenBatch,
    *,
    level: MisLevel = "token",
    low: BandLow | None = None,
    high: BandHigh | None = None,
    weighted: bool | None = None,
    weight: MisLevel | None = None,
    veto: Veto = None,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
) -> Surrogate:
    """Needs `logp_prox`. None is the default of the level; both ends of the band are inclusive.

    Raises ValueError for low above high, or a `weight` that `weighted` switches off.
    """
    c = correction(b, level=level, low=low, high=high, weighted=weighted, weight=weight, veto=veto)
    u, A = log_ratio(b, den=b.need("logp_prox", "mis")), on_mask(b, b.advantage)
    S, active, shares = clipped(u, A, 1 - eps_low, 1 + eps_high, c.W)
    return Surrogate(S, active, shares | c.diagnostics)
