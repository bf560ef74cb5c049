"""DPPO: S = M sg[min(r, cap)] A log pi, M masks tokens that move out once their divergence exceeds delta.

Source: "Rethinking the Trust Region in LLM RL" (2602.04879), official code (Stable-RL); SAT (47).

With p = pi(token), m = mu(token), r = p/m, the divergence D is

    tv       |p - m|                                                    (no factor 1/2)
    kl       m log(m/p) + (1-m) log((1-m+1e-8) / (1-p+1e-8))
    topk_tv  (1/2) sum |p_j - m_j|       over mu's top K tokens, the sampled token and one bucket
    topk_kl  sum m_j log(m_j/p_j)        for the rest, whose mass is held above 1e-12
    M = 0  iff  (A > 0, p > m, D > delta_high)  or  (A <= 0, p < m, D > delta_low)

Pull-back is always kept. The top-k kinds need `topk` and `topk_mu`. `form="pg"` is the form above,
of the official code; `form="ppo"` is the mask times GRPO's clip, the form of SAT's runs:
S = M min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).

Sources differ on delta: .2 (paper's appendix, SkyRL, prime-rl) or .15 (verl's script) for TV, .05 for
KL (verl's own default is .2 for both); SAT's runs use 1e-3. On cap: 10 in the official code, 5 in the
paper's runs, 3 in verl, whose configuration overrides the 20 in its function.

Gradient weight on grad log pi: M min(r, cap) A; form "ppo" M r A, 0 where the clip binds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from simlab.stabilizers.ppo import check_radii, clipped
from simlab.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask, ratio, weighted

DELTA = {"tv": 0.2, "kl": 0.05, "topk_tv": 0.2, "topk_kl": 0.05}
REST = 1e-12


def binary(kind: str, logp: Tensor, logm: Tensor) -> Tensor:
    """D of the two events "this token" and "any other" `[..., N]`."""
    p, m = logp.exp(), logm.exp()
    if kind == "tv":
        return (p - m).abs()
    return m * (logm - logp) + (1 - m) * (torch.log(1 - m + 1e-8) - torch.log(1 - p + 1e-8))


def top_k(kind: str, logp: Tensor, logm: Tensor, topk: Tensor, topk_mu: Tensor) -> Tensor:
    """D over the top K of mu `[..., N, K]`, the sampled token `[..., N]` and the rest."""
    rest_p, rest_m = (
        (1 - x.exp() - top.exp().sum(-1)).clamp(min=REST).log()
        for x, top in ((logp, topk), (logm, topk_mu))
    )
    logp, logm = (
        torch.cat([top, x.unsqueeze(-1), rest.unsqueeze(-1)], -1)
        for x, top, rest in ((logp, topk, rest_p), (logm, topk_mu, rest_m))
    )
    if kind == "topk_tv":
        return (logp.exp() - logm.exp()).abs().sum(-1) / 2
    absent = logm == -math.inf
    return torch.where(absent, 0.0, logm.exp() * (logm - torch.where(absent, 0.0, logp))).sum(-1)


def surrogate(
    b: TokenBatch,
    *,
    divergence: str = "tv",
    delta_low: float | None = None,
    delta_high: float | None = None,
    cap: float = 10.0,
    form: str = "pg",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Surrogate:
    """A delta of None is the default of its divergence. Raises ValueError for impossible values."""
    check_radii("dppo", eps_low, eps_high)
    if divergence not in DELTA:
        raise ValueError(f"dppo: divergence must be {', '.join(DELTA)}, got {divergence!r}")
    low = DELTA[divergence] if delta_low is None else delta_low
    high = DELTA[divergence] if delta_high is None else delta_high
    if not (low >= 0 and high >= 0):
        raise ValueError(f"dppo: delta_low and delta_high must be at least 0, got {low}, {high}")
    if not cap > 0:
        raise ValueError(f"dppo: cap must be above 0, got {cap}")
    if form not in ("pg", "ppo"):
        raise ValueError(f"dppo: form must be pg or ppo, got {form!r}")
    A, p, logm = (on_mask(b, x) for x in (b.advantage, b.logp.detach(), b.logp_mu))
    d = log_ratio(b)
    if divergence in ("tv", "kl"):
        D = binary(divergence, p, logm)
    else:
        tops = (b.need(x, "dppo").detach().to(p.dtype) for x in ("topk", "topk_mu"))
        D = top_k(divergence, p, logm, *tops)
    x = d.detach()
    up, down = (A > 0) & (x > 0) & (D > high), (A <= 0) & (x < 0) & (D > low)
    W = (
        torch.where(up | down, 0.0, ratio(x).clamp(max=cap))
        if form == "pg"
        else (~(up | down)).to(p)
    )
    if form == "ppo":
        S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, W)
        up, down = up | shares["clip_high"].value, down | shares["clip_low"].value
        shares |= {"clip_high": Diagnostic(up, "mean"), "clip_low": Diagnostic(down, "mean")}
        return Surrogate(S, active, shares)
    shares = {"clip_high": up, "clip_low": down, "capped": lambda: ratio(x) > cap}
    shown = {name: Diagnostic(share, "mean") for name, share in shares.items()}
    return weighted(b, W * A, shown)
