"""GSPO: S = min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), rho = exp(mean_t d_t) of the response.

Source: Zheng et al. 2025 (2507.18071); SAT (37), (38). r = pi/mu here; the paper writes pi_old.

Aggregate by seq_mean_token_mean. Paper defaults 3e-4 / 4e-4 (v2, 5.1); SAT's runs use 0.2 / 0.2, with
which the clip hardly ever binds.

Gradient weight on token t: (1/T) sum over the response of rho A' (A' the advantages not clipped;
a dual clip, which is not the paper's, clips A < 0 at rho > c, ppo.py).
GSPO-token (`per_token`): the value is the same and the gradient goes through the token's own
log-prob, weight rho A; the two differ when advantages vary inside a response.
"""

from __future__ import annotations

from torch import Tensor

from simlab.core.per_response import response_means
from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import DualClip, RadiusHigh, RadiusLow, clipped, share_gradient


def surrogate(
    b: TokenBatch,
    *,
    eps_low: RadiusLow = 3e-4,
    eps_high: RadiusHigh = 4e-4,
    per_token: bool = False,
    dual_clip: DualClip = None,
    W: Tensor | None = None,
) -> Surrogate:
    """GSPO against the rollout policy; `per_token=True` is GSPO-token. W `[..., N]` multiplies S."""
    d, A = log_ratio(b), on_mask(b, b.advantage)
    mean_d = response_means(b, d)
    if per_token:
        mean_d = mean_d.detach() + (d - d.detach())
    S, active, diagnostics = clipped(mean_d, A, 1 - eps_low, 1 + eps_high, W, dual_clip)
    if not per_token:
        active = share_gradient(b, active, S)
    return Surrogate(S, active, diagnostics)
