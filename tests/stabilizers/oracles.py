"""The formulas once more, in numpy, written from the papers: (S, d sum S / d logp) per active token.

An oracle sees active tokens only, as float64 arrays: logp, mu, prox (log-probs), A, response.
"""

import numpy as np


def clip(d, A, low, high):
    """min(r A, clip(r, low, high) A); the weight is r A unless the clip binds."""
    r = np.exp(d)
    binds = ((A > 0) & (r > high)) | ((A < 0) & (r < low))
    return np.minimum(r * A, np.clip(r, low, high) * A), np.where(binds, 0, r * A)


def response_mean(b, x):
    """The mean over the response, on each of its tokens."""
    return (np.bincount(b.response, x) / np.maximum(np.bincount(b.response), 1))[b.response]


def none(b):
    return b.A * b.logp, b.A


def pg(b):
    S = np.exp(b.logp - b.mu) * b.A
    return S, S


def ppo(b, eps_low=0.2, eps_high=0.2, dual_clip=None):
    S, w = clip(b.logp - b.mu, b.A, 1 - eps_low, 1 + eps_high)
    if dual_clip is not None:
        floor = np.where(b.A < 0, dual_clip * b.A, -np.inf)
        S, w = np.maximum(S, floor), np.where(floor > S, 0, w)
    return S, w


def gspo(b, eps_low=3e-4, eps_high=4e-4, per_token=False):
    S, w = clip(response_mean(b, b.logp - b.mu), b.A, 1 - eps_low, 1 + eps_high)
    return S, w if per_token else response_mean(b, w)


def sat(b, eps_low=0.2, eps_high=0.2, alpha=0.9, exponent=2, factor=None, level="token"):
    d = b.logp - b.mu
    if level == "sequence":
        d = response_mean(b, d)
    u = np.abs(d)
    q = np.quantile(u, alpha, method="inverted_cdf")
    with np.errstate(divide="ignore", invalid="ignore"):
        c = 1 / (1 + (u / q) ** exponent) if factor is None else np.full_like(d, factor)
    c = np.where((q > 0) & (u > q), c, 1)
    c_plus, c_minus = np.where(d > 0, c, 1), np.where(d < 0, c, 1)
    S, w = clip(d, b.A, 1 - eps_low * c_minus, 1 + eps_high * c_plus)
    return S, response_mean(b, w) if level == "sequence" else w


def dppo(b, divergence="tv", delta_low=None, delta_high=None, cap=10):
    p, m = np.exp(b.logp), np.exp(b.mu)
    default = {"tv": 0.2, "kl": 0.05}[divergence]
    low, high = (default if x is None else x for x in (delta_low, delta_high))
    D = np.abs(p - m)
    if divergence == "kl":
        D = m * (b.mu - b.logp) + (1 - m) * np.log((1 - m + 1e-8) / (1 - p + 1e-8))
    drop = np.where(b.A > 0, (p > m) & (D > high), (p < m) & (D > low))
    w = np.where(drop, 0, np.minimum(p / m, cap) * b.A)
    return w * b.logp, w


def icepop(b, low=0.5, high=5, weighted=True, band="mismatch", eps_low=0.2, eps_high=0.2):
    k = np.exp(b.prox - b.mu)
    tested = k if band == "mismatch" else np.exp(b.logp - b.mu)
    M = np.where((tested >= low) & (tested <= high), k if weighted else 1, 0)
    S, w = clip(b.logp - b.prox, b.A, 1 - eps_low, 1 + eps_high)
    return M * S, M * w


def bernoulli(p, m):
    """KL of two coins."""
    return p * np.log(p / m) + (1 - p) * np.log((1 - p) / (1 - m))


def kpop(b, phi=0.1, direction="both", anchor="current", eps_low=0.2, eps_high=0.2):
    p, m = np.exp(b.logp if anchor == "current" else b.prox), np.exp(b.mu)
    forward, reverse = bernoulli(p, m) <= phi, bernoulli(m, p) <= phi
    inside = {"forward": forward, "reverse": reverse, "both": forward & reverse}[direction]
    S, w = clip(b.logp - b.mu, b.A, 1 - eps_low, 1 + eps_high)
    return inside * S, inside * w


def tis(b, cap=2, form="ppo", eps_low=0.2, eps_high=0.2):
    if form == "pg":
        w = np.minimum(np.exp(b.logp - b.mu), cap) * b.A
        return w * b.logp, w
    S, w = clip(b.logp - b.prox, b.A, 1 - eps_low, 1 + eps_high)
    k = np.minimum(np.exp(b.prox - b.mu), cap)
    return k * S, k * w


ORACLES = {f.__name__: f for f in (dppo, gspo, icepop, kpop, none, pg, ppo, sat, tis)}
