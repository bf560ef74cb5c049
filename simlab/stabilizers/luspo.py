"""LUSPO: S = T min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), rho = exp(mean_t d_t), T tokens a response.

Source: Length-Unbiased Sequence Policy Optimization (2602.05261), read as TRL's loss_type luspo. r = pi/mu here.

GSPO times the length of the response, which takes back the 1/T of its mean: aggregated by
seq_mean_token_mean a long response moves each of its tokens as much as a short one does. Radii are
GSPO's paper's; TRL's default is 0.2 / 0.2.

Gradient weight on token t: the sum over the response of rho A' (A' the advantages not clipped).
"""

from __future__ import annotations

from simlab.core.per_response import response_lengths, response_means, to_tokens
from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import RadiusHigh, RadiusLow, clipped, share_gradient


def surrogate(
    b: TokenBatch, *, eps_low: RadiusLow = 3e-4, eps_high: RadiusHigh = 4e-4
) -> Surrogate:
    """Whole responses only."""
    d = response_means(b, log_ratio(b))
    T = to_tokens(b, response_lengths(b)).to(d.dtype)
    S, active, shares = clipped(d, on_mask(b, b.advantage), 1 - eps_low, 1 + eps_high, T)
    return Surrogate(S, share_gradient(b, active, S), shares)
