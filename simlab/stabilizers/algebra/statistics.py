"""Ratios of a token, reduced over its response, and divergences: what corrections look at.

Three ratios, by one letter each: k = prox/mu, r = pi/mu, u = pi/prox, where prox is `logp_prox`. Six
levels: the token's own value, the sum of the values of its response up to it (prefix), or the sum, mean,
smallest or largest of all of them.
Nothing here carries a gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from simlab.core.in_order import InOrder
from simlab.core.per_response import response_means, response_sums, to_tokens
from simlab.core.tokens import TokenBatch, log_ratio, on_mask

Ratio = Literal["k", "r", "u"]
Reduction = Literal["token", "sum", "mean", "min", "max", "prefix"]
Gate = Literal["ratio", "difference", "tv", "binary_kl", "reverse_kl", "k1", "k2", "k3"]
PAIR = {"k": ("logp_prox", "logp_mu"), "r": ("logp", "logp_mu"), "u": ("logp", "logp_prox")}
# as methods call the levels
WRITTEN: dict[str, Literal["token", "sum", "mean"]] = {
    "token": "token",
    "sequence": "sum",
    "geometric": "mean",
}
FLOOR = 1e-6  # of the probabilities in a Bernoulli KL


def log_probs(b: TokenBatch, of: Ratio, method: str) -> tuple[Tensor, Tensor]:
    """Log-probs of numerator and denominator `[..., N]` in nats, without gradient; anything where masked.

    Raises ValueError, naming `method`, where the batch has no `logp_prox` for k or u.
    """
    num, den = (b.need(name, method).detach() for name in PAIR[of])
    return num, den


def log_of(b: TokenBatch, of: Ratio, method: str) -> Tensor:
    """The logarithm of k, r or u `[..., N]` in nats, 0 where masked."""
    num, den = log_probs(b, of, method)
    return log_ratio(b, num, den)


def reduced(b: TokenBatch, x: Tensor, level: Reduction) -> Tensor:
    """x `[..., N]` at a level, the same on all tokens of a response but for token and prefix; 0 where masked.

    Raises ValueError where prefix finds no `position`."""
    x = x.detach()
    if level == "token":
        return x
    if level == "prefix":
        return InOrder(b, "level prefix").sums(x).to(x.dtype)
    if level == "sum":
        return to_tokens(b, response_sums(b, x))
    if level == "mean":
        return response_means(b, x)
    sign = -1 if level == "min" else 1
    start = torch.full((*x.shape[:-1], b.n_responses), -math.inf, dtype=x.dtype, device=x.device)
    index = torch.where(b.mask, b.response, 0)
    signed = torch.where(b.mask, sign * x, -math.inf)
    return sign * to_tokens(b, start.scatter_reduce(-1, index, signed, "amax"))


def bernoulli_kl(logp: Tensor, logm: Tensor, floor: float = FLOOR) -> Tensor:
    """D(p||m) in nats of the events "this token" and "any other", from log-probs; probabilities are held
    above `floor`."""
    p, m = logp.exp().clamp(floor, 1 - floor), logm.exp().clamp(floor, 1 - floor)
    rest_p, rest_m = ((-x.expm1()).clamp(min=floor) for x in (logp, logm))
    return p * (p / m).log() + rest_p * (rest_p / rest_m).log()


def divergence(b: TokenBatch, of: Ratio, gate: Gate, method: str) -> Tensor:
    """How far apart the two policies of a ratio are at each token `[..., N]`, 0 where masked.

    With x = log(num/den): ratio and k1 are x, k2 is x^2 / 2, k3 is e^x - 1 - x, all in nats; difference
    is num - den and tv its size; binary_kl is D(den||num) and reverse_kl D(num||den), in nats, of the
    events "this token" and "any other".
    """
    x = log_of(b, of, method)
    if gate in ("ratio", "k1"):
        return x
    if gate == "k2":
        return x**2 / 2
    if gate == "k3":
        return torch.expm1(x) - x
    num, den = (on_mask(b, y) for y in log_probs(b, of, method))
    if gate == "binary_kl":
        return bernoulli_kl(den, num).clamp(min=0)
    if gate == "reverse_kl":
        return bernoulli_kl(num, den).clamp(min=0)
    tv = -torch.maximum(num, den).exp() * torch.expm1(-x.abs())  # nothing cancels or overflows
    return tv if gate == "tv" else x.sign() * tv
