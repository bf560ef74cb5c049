"""SeqClip: S = 1[low <= rho <= high] min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), rho as GSPO.

Source: SAT (39); band [.995, 1.005] from its page. No run of it is published.

A response whose mean log-ratio leaves the band is dropped whole, on either side.

Gradient weight on token t: (1/T) sum over the response of rho A', 0 outside the band.
"""

from __future__ import annotations

from simlab.batch_stats import response_means
from simlab.stabilizers.gspo import share_gradient
from simlab.stabilizers.icepop import check_band, in_band
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask


def surrogate(
    b: TokenBatch,
    *,
    low: float = 0.995,
    high: float = 1.005,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """Both ends of the band are inclusive. Raises ValueError for an impossible band or radius."""
    check_radii("seqclip", eps_low, eps_high)
    check_band("seqclip", low, high)
    A, d = on_mask(b, b.advantage), response_means(b, log_ratio(b))
    inside = in_band(d.detach(), low, high)
    S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, inside.to(d.dtype))
    shown = {"out_of_band": Diagnostic(~inside, "mean")}
    return Surrogate(S, share_gradient(b, active, A), shares | shown)
