"""The formulas once more, in numpy, written from the papers: (S, d sum S / d logp) per active token.

An oracle sees active tokens only, as arrays: logp, mu, prox (log-probs), A, response; where a method
reads them also entropy_mu, gini_mu, age, uniform, stratum, tv and topk_mu, topk `[n, K]`. They are the
whole batch, so whole-batch numbers are computed on the spot. A method with a gradient on its head adds
d sum S / d topk `[n, K]`.
"""

import numpy as np
from oracles_more import MORE, clip, response_mean, response_sum
from oracles_rest import REST


def none(b):
    return b.A * b.logp, b.A


def pg(b):
    S = np.exp(b.logp - b.mu) * b.A
    return S, S


def dual(b, S, w, c):
    """S held above c A where A < 0, without gradient there."""
    if c is None:
        return S, w
    floor = np.where(b.A < 0, c * b.A, -np.inf)
    return np.maximum(S, floor), np.where(floor > S, 0, w)


def ppo(b, eps_low=0.2, eps_high=0.2, dual_clip=None):
    S, w = clip(b.logp - b.mu, b.A, 1 - eps_low, 1 + eps_high)
    return dual(b, S, w, dual_clip)


def gspo(b, eps_low=3e-4, eps_high=4e-4, per_token=False, dual_clip=None):
    S, w = clip(response_mean(b, b.logp - b.mu), b.A, 1 - eps_low, 1 + eps_high)
    S, w = dual(b, S, w, dual_clip)
    return S, w if per_token else response_mean(b, w)


def sat(
    b,
    eps_low=0.2,
    eps_high=0.2,
    alpha=0.9,
    exponent=2,
    factor=None,
    shape="hill",
    level="token",
    dual_clip=None,
):
    d = b.logp - b.mu
    if level == "sequence":
        d = response_mean(b, d)
    u = np.abs(d)
    q = np.quantile(u, alpha, method="inverted_cdf")
    with np.errstate(divide="ignore", invalid="ignore"):
        x = (u / q) ** exponent
    kernels = {"hill": 1 / (1 + x), "exponential": 0.5**x, "linear": np.maximum(0, 1 - x / 2)}
    c = kernels[shape] if factor is None else np.full_like(d, factor)
    c = np.where((q > 0) & (u > q), c, 1)
    c_plus, c_minus = np.where(d > 0, c, 1), np.where(d < 0, c, 1)
    S, w = dual(b, *clip(d, b.A, 1 - eps_low * c_minus, 1 + eps_high * c_plus), dual_clip)
    return S, response_mean(b, w) if level == "sequence" else w


def top_k(b):
    """Probabilities of mu's top K tokens, the sampled token and the rest, under pi and under mu."""
    both = []
    for sampled, top in ((b.logp, b.topk), (b.mu, b.topk_mu)):
        named = np.exp(np.column_stack([top, sampled]))
        rest = np.maximum(1 - named.sum(1, keepdims=True), 1e-12)
        both.append(np.hstack([named, rest]))
    return both


def dppo(
    b,
    divergence="tv",
    delta_low=None,
    delta_high=None,
    cap=10,
    form="pg",
    eps_low=0.2,
    eps_high=0.2,
    dual_clip=None,
):
    p, m = np.exp(b.logp), np.exp(b.mu)
    default = 0.05 if divergence.endswith("kl") else 0.2
    low, high = (default if x is None else x for x in (delta_low, delta_high))
    if divergence == "tv":
        D = np.abs(p - m)
    elif divergence == "kl":
        D = m * (b.mu - b.logp) + (1 - m) * np.log((1 - m + 1e-8) / (1 - p + 1e-8))
    elif divergence == "topk_tv":
        P, M = top_k(b)
        D = np.abs(P - M).sum(1) / 2
    else:
        P, M = top_k(b)
        there = M > 0  # the sampled token takes its own place among the top K
        D = np.where(there, M * np.log(np.where(there, M, 1) / np.where(there, P, 1)), 0).sum(1)
    drop = np.where(b.A > 0, (p > m) & (D > high), (p < m) & (D > low))
    if form == "ppo":
        S, w = dual(b, *clip(b.logp - b.mu, b.A, 1 - eps_low, 1 + eps_high), dual_clip)
        return np.where(drop, 0, S), np.where(drop, 0, w)
    if dual_clip is not None:
        drop |= (b.A < 0) & (p / m > dual_clip)
    w = np.where(drop, 0, np.minimum(p / m, cap) * b.A)
    return w * b.logp, w


def icepop(
    b, low=0.5, high=5, weighted=True, band="mismatch", eps_low=0.2, eps_high=0.2, dual_clip=None
):
    k = np.exp(b.prox - b.mu)
    tested = k if band == "mismatch" else np.exp(b.logp - b.mu)
    M = np.where((tested >= low) & (tested <= high), k if weighted else 1, 0)
    S, w = dual(b, *clip(b.logp - b.prox, b.A, 1 - eps_low, 1 + eps_high), dual_clip)
    return M * S, M * w


def bernoulli(p, m):
    """KL of two coins."""
    return p * np.log(p / m) + (1 - p) * np.log((1 - p) / (1 - m))


def kpop(b, phi=0.1, direction="both", anchor="current", eps_low=0.2, eps_high=0.2, dual_clip=None):
    p, m = np.exp(b.logp if anchor == "current" else b.prox), np.exp(b.mu)
    forward, reverse = bernoulli(p, m) <= phi, bernoulli(m, p) <= phi
    inside = {"forward": forward, "reverse": reverse, "both": forward & reverse}[direction]
    S, w = dual(b, *clip(b.logp - b.mu, b.A, 1 - eps_low, 1 + eps_high), dual_clip)
    return inside * S, inside * w


def tis(b, cap=2, form="ppo", level="token", eps_low=0.2, eps_high=0.2):
    log_w = (b.logp if form == "pg" else b.prox) - b.mu
    if level == "sequence":
        log_w = response_sum(b, log_w)
    w = np.minimum(np.exp(log_w), cap)
    if form == "pg":
        return w * b.A * b.logp, w * b.A
    S, weight = clip(b.logp - b.prox, b.A, 1 - eps_low, 1 + eps_high)
    return w * S, w * weight


ORACLES = {f.__name__: f for f in (dppo, gspo, icepop, kpop, none, pg, ppo, sat, tis)}
ORACLES |= MORE | REST
