"""DPPO: mask a token that moves outward once its divergence from mu exceeds delta.

"Rethinking the Trust Region in LLM RL" (2602.04879), official code (Stable-RL); SAT (47). With
p = pi(token), m = mu(token) the two-event divergence is

    Binary-TV  D = |p - m|                      (no factor 1/2)
    Binary-KL  D = m log(m/p) + (1-m) log((1-m+1e-8) / (1-p+1e-8))
    M = 0  iff  (A > 0, p > m, D > delta_high)  or  (A <= 0, p < m, D > delta_low)

and S = M sg[min(r, cap)] A log pi: the policy-gradient form of the code. Pull-back is always kept.
Gradient weight on grad log pi: M min(r, cap) A.

Sources differ on delta: .2 (paper's appendix, SkyRL, prime-rl) or .15 (verl's script) for TV, .05 for
KL; SAT's runs use 1e-3. On cap: 10 in the official code, 5 in the paper's runs, 20 in verl.
"""

from __future__ import annotations

import torch

from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio

DELTA = {"tv": 0.2, "kl": 0.05}


def surrogate(
    b: TokenBatch,
    *,
    divergence: str = "tv",
    delta_low: float | None = None,
    delta_high: float | None = None,
    cap: float = 10.0,
) -> Surrogate:
    """Binary DPPO; a delta of None is the default of its divergence. Raises ValueError otherwise."""
    if divergence not in DELTA:
        raise ValueError(f"dppo: divergence must be tv or kl, got {divergence!r}")
    low = DELTA[divergence] if delta_low is None else delta_low
    high = DELTA[divergence] if delta_high is None else delta_high
    if not (low >= 0 and high >= 0):
        raise ValueError(f"dppo: delta_low and delta_high must be at least 0, got {low}, {high}")
    if not cap > 0:
        raise ValueError(f"dppo: cap must be above 0, got {cap}")
    A, logp, logp_mu = (on_mask(b, x) for x in (b.advantage, b.logp, b.logp_mu))
    d, p, m = log_ratio(b).detach(), logp.detach().exp(), logp_mu.exp()
    if divergence == "tv":
        D = (p - m).abs()
    else:
        D = -m * d + (1 - m) * (torch.log(1 - m + 1e-8) - torch.log(1 - p + 1e-8))
    up, down = (A > 0) & (d > 0) & (D > high), (A <= 0) & (d < 0) & (D > low)
    masked = b.mask & (up | down)
    weight = ratio(d).clamp(max=cap)
    S = torch.where(masked, 0.0, weight * A * logp)
    shares = {"clip_high": up, "clip_low": down, "capped": ratio(d) > cap}
    return Surrogate(
        S, (A != 0) & ~masked, {name: Diagnostic(x, "mean") for name, x in shares.items()}
    )
