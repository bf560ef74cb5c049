"""What score centering subtracts: the weight f of a token and the coefficients c of its head (centering.py).

Constants all of them; everything is decided on masses and on the log-ratio, and no p/q is formed.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from simlab.core.head import head
from simlab.core.tokens import Diagnostic, TokenBatch, log_ratio, on_mask, ratio
from simlab.stabilizers.parts import (
    Above0,
    AtLeast0,
    BandHigh,
    BandLow,
    RadiusHigh,
    RadiusLow,
    check_band,
    in_band,
)

Mode = Literal["none", "cap", "clamp", "band", "ipo", "clip"]
CAP = {"cap": 2.0, "ipo": 1e4}
LEAST = 1e-6  # of a tail mass


class Rule(NamedTuple):
    """f, by its mode and the numbers that the mode reads; the defaults of all of them."""

    mode: Mode = "none"
    cap: Above0 | None = None
    low: BandLow = 0.5
    high: BandHigh = 5.0
    weighted: bool = True
    eps: AtLeast0 = 0.3
    eps_low: RadiusLow = 0.2
    eps_high: RadiusHigh = 0.2


def mass(rule: Rule, p: Tensor, q: Tensor, d: Tensor, A: Tensor) -> Tensor:
    """q f(p/q), where d = log(p/q), all of a shape; without IPO's test, which `kept` is."""
    if rule.mode == "none":
        return q
    if rule.mode in CAP:
        return p.minimum((CAP[rule.mode] if rule.cap is None else rule.cap) * q)
    if rule.mode == "clamp":
        return p.maximum(rule.low * q).minimum(rule.high * q)
    if rule.mode == "band":
        return torch.where(in_band(d, rule.low, rule.high), p if rule.weighted else q, 0.0)
    low = math.log1p(-rule.eps_low) if rule.eps_low < 1 else -math.inf
    bound = ((A > 0) & (d > math.log1p(rule.eps_high))) | ((A < 0) & (d < low))
    return torch.where(bound, 0.0, p)


def kept(rule: Rule, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """x, and in mode ipo 0 where |p - q| > eps."""
    return torch.where((p - q).abs() <= rule.eps, x, 0.0) if rule.mode == "ipo" else x


class Terms(NamedTuple):
    """Constants of a batch: no gradient, no advantage."""

    f: Tensor  # [..., N] weight of the sampled token
    c: Tensor  # [..., N, K] coefficients of the columns, 0 where a column is the sampled token
    own: Tensor  # [..., N] coefficient of the sampled token, 0 outside of the head
    diagnostics: dict[str, Diagnostic]


@torch.no_grad()
def terms(b: TokenBatch, rule: Rule, columns: int | None, placebo: bool) -> Terms:
    """f and c of a batch."""
    check_band("centering", rule.low, rule.high)
    top, top_mu, sampled = head(b, "centering", columns)
    d, A = log_ratio(b), on_mask(b, b.advantage)
    p, q = (on_mask(b, x).exp() for x in (b.logp, b.logp_mu))
    pi, mu = top.exp(), top_mu.exp()
    in_head, in_head_mu = (torch.where(sampled, x, 0.0) + y.sum(-1) for x, y in ((p, pi), (q, mu)))
    rho = (1 - in_head_mu).clamp(min=LEAST) / (1 - in_head).clamp(min=LEAST)
    alpha = mass(rule, torch.ones_like(rho), rho, -rho.log(), A)
    m = kept(rule, pi, mu, mass(rule, pi, mu, top - top_mu, A.unsqueeze(-1)))
    c = torch.where(mu > 0, m, 0.0) - alpha.unsqueeze(-1) * pi
    own = torch.where(sampled, kept(rule, p, q, mass(rule, p, q, d, A)) - alpha * p, 0.0)
    r = ratio(d)
    f = torch.where(b.mask, kept(rule, p, q, mass(rule, r, torch.ones_like(r), d, A)), 0.0)
    size = c.abs().sum(-1) + own.abs()
    if placebo:
        c, own = turned(top, c, own, sampled, on_mask(b, b.need("uniform", "centering")))
    shown = {"centered": Diagnostic(size, "mean"), "head_mass": Diagnostic(in_head_mu, "mean")}
    return Terms(f.detach(), c.detach(), own.detach(), shown)


def turned(
    top: Tensor, c: Tensor, own: Tensor, sampled: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Coefficients moved 1 to K - 1 places round the columns by the uniform draw u `[..., N]`."""
    K = top.shape[-1]
    absent = top == -torch.inf
    column = torch.arange(K, device=top.device)
    place = (column == absent.long().argmax(-1, keepdim=True)) & sampled.unsqueeze(-1)
    row = torch.where(place, own.unsqueeze(-1), c)
    step = 1 + (u * (K - 1)).long().clamp(max=max(K - 2, 0))
    row = row.gather(-1, (column + step.unsqueeze(-1)) % K)
    return torch.where(absent, 0.0, row), torch.where(place, row, 0.0).sum(-1)
