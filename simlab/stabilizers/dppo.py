"""DPPO: S = M sg[min(r, cap)] A log pi, M masks tokens that move out once their divergence exceeds delta.

Source: "Rethinking the Trust Region in LLM RL" (2602.04879), official code (Stable-RL); SAT (47).

With p = pi(token), m = mu(token), r = p/m, the divergence D is

    tv       |p - m|                                                    (no factor 1/2)
    kl       m log(m/p) + (1-m) log((1-m+1e-8) / (1-p+1e-8))
    topk_tv  (1/2) sum |p_j - m_j|       over mu's top `columns` tokens (None: all that the batch has),
    topk_kl  sum m_j log(m_j/p_j)        the sampled token and one bucket of mass above 1e-12 for the rest
    M = 0  iff  (A > 0, p > m, D > delta_high)  or  (A < 0, p < m, D > delta_low)

Pull-back is always kept, and a token without advantage has no gradient to lose. The top-k kinds need `topk` and `topk_mu`.
`form="pg"` is the form above, of the official code; `form="ppo"` that of SAT's runs, the mask times GRPO's clip.

Sources differ on delta: 0.2 (paper's appendix, SkyRL, prime-rl) or 0.15 (verl's script) for TV, 0.05 for KL (verl's own
default is 0.2 for both); SAT's runs use 1e-3. On cap: 10 in the official code, 5 in the paper's runs, 3 in verl.

Gradient weight: M min(r, cap) A; form "ppo" M r A, 0 where the clip binds. Dual clip (ppo.py, not the paper's): 0 there.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from simlab.core.head import Columns, head
from simlab.core.tokens import (
    Diagnostic,
    Surrogate,
    TokenBatch,
    log_ratio,
    on_mask,
    ratio,
    weighted,
)
from simlab.stabilizers.algebra.corrections import Correction
from simlab.stabilizers.parts import Above0, AtLeast0, DualClip, RadiusHigh, RadiusLow, clipped

Divergence = Literal["tv", "kl", "topk_tv", "topk_kl"]
DELTA = {"tv": 0.2, "kl": 0.05, "topk_tv": 0.2, "topk_kl": 0.05}
REST = 1e-12


def binary(kind: str, logp: Tensor, logm: Tensor) -> Tensor:
    """D of the two events "this token" and "any other" `[..., N]`. Finite where rounding has put a
    log-prob above 0: the other event then has probability 0."""
    p, m = logp.exp(), logm.exp()
    if kind == "tv":
        return (p - m).abs()
    rest_p, rest_m = (1 - p).clamp(min=0), (1 - m).clamp(min=0)
    return m * (logm - logp) + rest_m * (torch.log(rest_m + 1e-8) - torch.log(rest_p + 1e-8))


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


def outside(b: TokenBatch, divergence: Divergence, low, high, columns: Columns, shrink):
    """Tokens that move up, and down, out of their limit `[..., N]`. ValueError for a missing `topk`."""
    low, high = (DELTA[divergence] if x is None else x for x in (low, high))
    low, high = (low, high) if shrink is None else (low * shrink, high * shrink)
    A, p, logm = (on_mask(b, x) for x in (b.advantage, b.logp.detach(), b.logp_mu))
    if divergence in ("tv", "kl"):
        D = binary(divergence, p, logm)
    else:
        tops = head(b, "dppo", columns)
        D = top_k(divergence, p, logm, tops.logp.detach(), tops.logp_mu)
    x = log_ratio(b).detach()
    return (A > 0) & (x > 0) & (D > high), (A < 0) & (x < 0) & (D > low)


def correction(
    b: TokenBatch,
    *,
    divergence: Divergence = "tv",
    delta_low: AtLeast0 | None = None,
    delta_high: AtLeast0 | None = None,
    columns: Columns = None,
    shrink: Tensor | None = None,
) -> Correction:
    """rejects a token that moves away from mu with {divergence} above {delta_high} (A > 0) or {delta_low} (A < 0); None is the default"""
    rejected = torch.logical_or(*outside(b, divergence, delta_low, delta_high, columns, shrink))
    return Correction("r", None, ~rejected, {"rejected": Diagnostic(rejected, "mean")})


def surrogate(
    b: TokenBatch,
    *,
    divergence: Divergence = "tv",
    delta_low: AtLeast0 | None = None,
    delta_high: AtLeast0 | None = None,
    cap: Above0 = 10.0,
    form: Literal["pg", "ppo"] = "pg",
    columns: Columns = None,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    dual_clip: DualClip = None,
    shrink: Tensor | None = None,
) -> Surrogate:
    """A delta of None is the default of its divergence; `shrink` `[..., N]` multiplies both (`+contract`)."""
    A, d = on_mask(b, b.advantage), log_ratio(b)
    up, down = outside(b, divergence, delta_low, delta_high, columns, shrink)
    if form == "ppo":
        keep = (~(up | down)).to(d.dtype)
        S, active, shares = clipped(d, A, 1 - eps_low, 1 + eps_high, keep, dual_clip)
        up, down = up | shares["clip_high"].value, down | shares["clip_low"].value
        shares |= {"clip_high": Diagnostic(up, "mean"), "clip_low": Diagnostic(down, "mean")}
        return Surrogate(S, active, shares)
    r = ratio(d.detach())
    shares = {"clip_high": up, "clip_low": down, "capped": r > cap}
    if dual_clip is not None:
        shares["clip_dual"] = (A < 0) & (r > dual_clip)
    W = torch.where(up | down | shares.get("clip_dual", up), 0.0, r.clamp(max=cap))
    return weighted(b, W * A, {k: Diagnostic(share, "mean") for k, share in shares.items()})
