"""Score centering: S = sg[f(r)] A log pi - A sum_v sg[c_v] log pi_v, c_v = mu_v f(pi_v/mu_v) - alpha pi_v, r = pi/mu.

Source: Marek and Ryabinin 2026 (2609.20807); verl, vime, NeMo-RL, prime-rl.

Under mu the scores do not have mean 0: E_mu[A grad log pi] holds a drift E[A] E_mu[grad log pi] that has
nothing to do with reward. The second term is its exact value at every state, so E_mu of the gradient of a
constant advantage is 0 for every weight f. It stays an expectation under mu, not an estimate for pi.

The sum is over the head, mu's K likeliest tokens (core/head.py); the rest of mu is taken to be rho pi,
rho = (1 - mu(H)) / (1 - pi(H)), and alpha = rho f(1/rho) removes it, as sum_v pi_v grad log pi_v = 0.
With all tokens in the head it is exact and alpha drops out. f and m_v = mu_v f(pi_v/mu_v) are

    none   1                        mu                                      REINFORCE
    cap    min(r, cap)              min(pi, cap mu)                         TIS
    clamp  clamp(r, low, high)      clamp(pi, low mu, high mu)
    band   r if low <= r <= high    pi if in the band    (else 0)           IcePop, MIS; weighted=False: 1 and mu
    ipo    min(r, cap) if |pi - mu| <= eps,  m alike; the tail is taken to be kept
    clip   r where PPO's clip leaves a gradient for the sign of A, m alike      the exact one for PPO

A token that f drops keeps its centering, which has its A. Where m_v would divide by mu_v = 0 it is 0. Both
tail masses are held above 1e-6 (verl, vime, prime-rl; NeMo-RL: the lower one only). Defaults: cap 2 (1e4
in mode ipo), the band of IcePop, eps of prime-rl, radii of PPO.

`extra` is the second term alone, for any base: zero mean holds where the base weighs a token by f(pi/mu),
which a base on pi/prox does at pi = prox, and no longer once `factor` depends on the response.
`placebo` gives the coefficients of a state to its tokens turned by a random number of places.

Gradient weight on grad log pi: f(r) A (minus c A in the head); on grad log pi_v: -c_v A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.core.head import Columns, graded_head, head
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, on_mask
from simlab.stabilizers.coefficients import Mode, Rule, terms
from simlab.stabilizers.parts import Above0, AtLeast0, BandHigh, BandLow, RadiusHigh, RadiusLow

LOWEST = -1e4  # nats; stands for -inf where the coefficient is 0


def joined(
    b: TokenBatch, columns: int | None, w: Tensor, c: Tensor, shown: dict[str, Diagnostic]
) -> Surrogate:
    """S = w log pi + sum_v c_v log pi_v, with these gradient weights `[..., N]` and `[..., N, K]`."""
    x, top = on_mask(b, b.logp), head(b, "centering", columns).logp
    with torch.no_grad():
        S = w * x + (c * top.clamp(min=LOWEST)).sum(-1)
    return Surrogate(graded_head(x, top, S, w, c), (w != 0) | (c != 0).any(-1), shown)


def extra(
    b: TokenBatch,
    *,
    factor: Tensor | None = None,
    mode: Mode = "none",
    cap: Above0 | None = None,
    low: BandLow = 0.5,
    high: BandHigh = 5.0,
    weighted: bool = True,
    eps: AtLeast0 = 0.3,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    columns: Columns = None,
    placebo: bool = False,
) -> Surrogate:
    """-factor A sum_v sg[c_v] log pi_v, to be added to a base: `base+centering:...`.

    `factor` `[..., N]` is what else the base's weight is multiplied with, constant over the tokens of a
    state: a response's keep or cap. Not the token's own weight, which is f.
    """
    rule = Rule(mode, cap, low, high, weighted, eps, eps_low, eps_high)
    x = terms(b, rule, columns, placebo)
    A = on_mask(b, b.advantage)
    A = A if factor is None else factor.detach() * A
    return joined(b, columns, -A * x.own, -A.unsqueeze(-1) * x.c, x.diagnostics)


def surrogate(
    b: TokenBatch,
    *,
    mode: Mode = "none",
    cap: Above0 | None = None,
    low: BandLow = 0.5,
    high: BandHigh = 5.0,
    weighted: bool = True,
    eps: AtLeast0 = 0.3,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    columns: Columns = None,
    placebo: bool = False,
) -> Surrogate:
    """Needs `topk` and `topk_mu`, and reads the first `columns` of them (None: all)."""
    rule = Rule(mode, cap, low, high, weighted, eps, eps_low, eps_high)
    x = terms(b, rule, columns, placebo)
    A = on_mask(b, b.advantage)
    return joined(b, columns, A * (x.f - x.own), -A.unsqueeze(-1) * x.c, x.diagnostics)
