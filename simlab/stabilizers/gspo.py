"""GSPO: S = min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), rho = exp(mean_t d_t) of the response.

Source: Zheng et al. 2025 (2507.18071); SAT (37), (38). r = pi/mu here; the paper writes pi_old.

Aggregate by seq_mean_token_mean. Paper defaults 3e-4 / 4e-4 (v2, 5.1); SAT's runs use .2 / .2, with
which the clip hardly ever binds.

Gradient weight on token t: (1/T) sum over the response of rho A' (A' the advantages not clipped).
GSPO-token (`per_token`): the value is the same and the gradient goes through the token's own
log-prob, weight rho A; the two differ when advantages vary inside a response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.batch_stats import response_means, response_sums, to_tokens
from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Surrogate, TokenBatch, log_ratio, on_mask


def share_gradient(b: TokenBatch, active: Tensor, A: Tensor) -> Tensor:
    """Tokens reached when each response's gradient is spread over its tokens: `[..., N]` bool."""
    total = response_sums(b, torch.where(active, A, 0))
    return b.mask & (to_tokens(b, total) != 0)


def surrogate(
    b: TokenBatch, *, eps_low: float = 3e-4, eps_high: float = 4e-4, per_token: bool = False
) -> Surrogate:
    """GSPO against the rollout policy; `per_token=True` is GSPO-token."""
    check_radii("gspo", eps_low, eps_high)
    d, A = log_ratio(b), on_mask(b, b.advantage)
    mean_d = response_means(b, d)
    if per_token:
        mean_d = mean_d.detach() + (d - d.detach())
    S, active, diagnostics = clipped(mean_d, A, 1 - eps_low, 1 + eps_high)
    if not per_token:
        active = share_gradient(b, active, A)
    return Surrogate(S, active, diagnostics)
