"""The rest of the numpy oracles (see oracles.py), and what they share."""

import math
from fractions import Fraction

import numpy as np


def clip(d, A, low, high):
    """min(r A, clip(r, low, high) A); the weight is r A unless the clip binds."""
    r = np.exp(d)
    binds = ((A > 0) & (r > high)) | ((A < 0) & (r < low))
    return np.minimum(r * A, np.clip(r, low, high) * A), np.where(binds, 0, r * A)


def response_sum(b, x):
    """The sum over the response, on each of its tokens."""
    return np.bincount(b.response, x)[b.response]


def response_mean(b, x):
    """The mean over the response, on each of its tokens."""
    return response_sum(b, x) / np.bincount(b.response)[b.response]


def order_statistic(x, part):
    """The k-th smallest, k = ceil(part n), part read as a decimal."""
    return np.sort(x)[math.ceil(Fraction(str(part)) * len(x)) - 1]


def seqclip(b, low=0.995, high=1.005, eps_low=0.2, eps_high=0.2):
    dbar = response_mean(b, b.logp - b.mu)
    keep = (np.exp(dbar) >= low) & (np.exp(dbar) <= high)
    S, w = clip(dbar, b.A, 1 - eps_low, 1 + eps_high)
    return keep * S, response_mean(b, keep * w)


def mis(b, level="token", low=None, high=None, weighted=None, weight=None, veto=None, eps_low=0.2, eps_high=0.2):  # fmt: skip
    log_k = b.prox - b.mu
    table = {
        "token": (log_k, (0.5, 2, True)),
        "sequence": (response_sum(b, log_k), (0, 2, True)),
        "geometric": (response_mean(b, log_k), (0.999, 1.001, False)),
    }
    log_x, default = table[level]
    given = (low, high, weighted)
    low, high, weighted = (d if g is None else g for g, d in zip(given, default, strict=True))
    x = np.exp(log_x)
    by = np.exp(table[weight][0]) if weight else x if weighted else 1
    W = np.where((x >= low) & (x <= high), by, 0)
    if veto is not None:
        W = np.where(response_sum(b, np.exp(log_k) < veto) > 0, 0, W)
    S, w = clip(b.logp - b.prox, b.A, 1 - eps_low, 1 + eps_high)
    return W * S, W * w


def cispo(b, eps_low=1, eps_high=0.2):
    w = np.clip(np.exp(b.logp - b.mu), 1 - eps_low, 1 + eps_high) * b.A
    return w * b.logp, w


def drpo(b, delta=12.5):
    p, m = np.exp(b.logp), np.exp(b.mu)
    r, size = p / m, np.abs(b.A)
    return r * b.A - size * m * (r - 1) ** 2 / (2 * delta), r * (b.A - size * (p - m) / delta)


def spo(b, eps=0.2):
    r, size = np.exp(b.logp - b.mu), np.abs(b.A)
    return r * b.A - size * (r - 1) ** 2 / (2 * eps), r * (b.A - size * (r - 1) / eps)


def sapo(b, tau_pos=1, tau_neg=1.05):
    r, tau = np.exp(b.logp - b.mu), np.where(b.A > 0, tau_pos, tau_neg)
    fall = np.exp(-tau * (r - 1))
    s = 1 / (1 + fall)  # and 1 - s = s fall, without cancelling
    return 4 / tau * s * b.A, 4 * s * s * fall * r * b.A


def opsm(b, delta=1e-4, level="token", eps_low=0.2, eps_high=0.2):
    d = b.logp - b.mu
    drop = ((response_mean(b, b.A) if level == "sequence" else b.A) < 0) & (
        -response_mean(b, d) > delta
    )
    S, w = clip(d, b.A, 1 - eps_low, 1 + eps_high)
    return np.where(drop, 0, S), np.where(drop, 0, w)


def m2po(b, budget=0.04, low=0.3, high=0.5, cut="clip"):
    d = b.logp - b.mu
    harm = np.abs(d)[b.A * d > 0]
    if len(harm) == 0 or (harm**2).mean() <= budget:
        tau = np.inf
    else:
        left = (lambda t: harm[harm <= t]) if cut == "remove" else (lambda t: np.minimum(harm, t))
        tau = max((t for t in harm if (left(t) ** 2).mean() <= budget), default=0)
    S, w = clip(d, b.A, min(np.exp(-tau), 1 - low), max(np.exp(tau), 1 + high))
    return (w, w) if cut == "remove" else (S, w)


def minirl(b, eps_low=0.2, eps_high=0.27, cap=5):
    u = np.exp(b.logp - b.prox)
    drop = ((b.A > 0) & (u > 1 + eps_high)) | ((b.A < 0) & (u < 1 - eps_low))
    w = np.where(drop, 0, np.minimum(np.exp(b.logp - b.mu), cap) * b.A)
    return w * b.logp, w


def gmpo(b, eps_low=0.4, eps_high=0.4):
    d = b.logp - b.mu
    held = ((b.A > 0) & (d > eps_high)) | ((b.A < 0) & (d < -eps_low))
    S = np.exp(response_mean(b, np.where(held, np.where(d > 0, eps_high, -eps_low), d))) * b.A
    return S, np.where(held, 0, response_mean(b, S))


def vaco(b, delta=0.2, scope="batch"):
    r = np.exp(b.logp - b.mu)
    far = np.abs(r - 1)
    D = (far.mean() if scope == "batch" else response_mean(b, far)) / 2
    S = np.where((D > delta) & (b.A * (r - 1) > 0), 0, r * b.A)
    return S, S


def estr(b, tau=None, rate=0.02, eps=0.01, scale="entropy", source="mu", eps_low=0.2, eps_high=0.2):
    d = b.logp - b.mu
    H = {"entropy": b.entropy_mu, "gini": b.gini_mu}[scale]
    if source == "trainer":
        H = b.entropy_prox
    elif source == "head":
        named = np.exp(np.column_stack([b.topk_mu, b.mu]))
        p = np.column_stack([named, np.maximum(1 - named.sum(1), 0)])
        H = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
        H = H if scale == "entropy" else 1 - (p**2).sum(1)
    score = d**2 / (H + eps)
    if tau is None:
        tau = order_statistic(score, 1 - Fraction(str(rate)))
    S, w = clip(d, b.A, 1 - eps_low, 1 + eps_high)
    return np.where(score <= tau, S, 0), np.where(score <= tau, w, 0)


def asympo(b, floor=1e-6):
    w = b.A / np.maximum(response_mean(b, -b.logp), floor)
    return w * b.logp, w


def spo_scaled(b, alpha):
    w = np.where(b.A < 0, alpha, 1) * b.A
    return w * b.logp, w


def decoupled(
    b,
    proximal="batch",
    mix=None,
    weight="cap",
    low=0,
    high=5,
    dual_clip=None,
    eps_low=0.2,
    eps_high=0.2,
):
    if proximal == "batch":
        prox = b.prox
    else:
        a = 1 / np.maximum(b.age, 1) if mix is None else mix
        prox = {
            "loglinear": a * b.mu + (1 - a) * b.logp,
            "arithmetic": np.log(a * np.exp(b.mu) + (1 - a) * np.exp(b.logp)),
        }[proximal]
    k = np.exp(prox - b.mu)
    W = {
        "cap": np.clip(k, low, high),
        "mask": np.where((k >= low) & (k <= high), k, 0),
        "none": np.ones_like(k),
    }[weight]
    S, w = clip(b.logp - prox, b.A, 1 - eps_low, 1 + eps_high)
    if dual_clip is not None:
        floor = np.where(b.A < 0, dual_clip * b.A, -np.inf)
        S, w = np.maximum(S, floor), np.where(floor > S, 0, w)
    return W * S, W * w


def two_factor(b, c=5, repair="mask", eps_low=0.2, eps_high=0.2):
    k = np.exp(b.prox - b.mu)
    held = np.clip(k, 1 / c, c)
    W = held if repair == "clamp" else np.where(k == held, k, 0)
    S, w = clip(b.logp - b.prox, b.A, 1 - eps_low, 1 + eps_high)
    return W * S, W * w


def vcpo(b, cap=8, base=1, rule="sqrt", baseline=True):
    w = np.minimum(np.exp(response_sum(b, b.logp - b.mu)), cap)
    # Summed over tokens: T w^2 A per response, with T its length and A its mean.
    best = (w**2 * b.A).sum() / (w**2).sum() if baseline else 0
    weight = w * (b.A - best)
    return weight * b.logp, weight


def sat_open(
    b,
    gate="mass",
    alpha=0.9,
    threshold=None,
    rate=0.1,
    exponent=2,
    factor=None,
    eps_low=0.2,
    eps_high=0.2,
    strata=8,
):
    d = b.logp - b.mu
    u = {"mass": np.abs(np.exp(b.logp) - np.exp(b.mu)), "tv": b.tv}.get(gate, np.abs(d))
    q = np.full_like(u, threshold if gate == "fixed" else order_statistic(u, alpha))
    if gate in ("stratum", "group"):
        kind = b.stratum if gate == "stratum" else b.group % strata
        for s in np.unique(kind):
            q[kind == s] = order_statistic(u[kind == s], alpha)
    on = u > q  # fixed, mass, tv, stratum, group
    if gate == "age":
        on = b.age > threshold
    elif gate == "random":
        on = b.uniform < rate
    elif gate == "inverted":
        smallest = np.lexsort((b.uniform, u))[: on.sum()]
        on = np.isin(np.arange(len(u)), smallest)
    on = on & (q > 0)
    x = u / np.where(q > 0, q, 1)
    c = np.where(on, 1 / (1 + x**exponent) if factor is None else factor, 1)
    low, high = np.where(d < 0, c, 1), np.where(d > 0, c, 1)
    return clip(d, b.A, 1 - eps_low * low, 1 + eps_high * high)


def oracle(b, delta=0.1):
    r = np.exp(b.logp - b.mu)
    S = np.where((b.tv > delta) & (b.A * (r - 1) > 0), 0, r * b.A)
    return S, S


def centering(
    b, mode="none", cap=None, low=0.5, high=5, weighted=True, eps=0.3, eps_low=0.2, eps_high=0.2,
    columns=None, placebo=False,
):  # fmt: skip
    cap = {"ipo": 1e4}.get(mode, 2) if cap is None else cap
    S, w, head = np.zeros_like(b.A), np.zeros_like(b.A), np.zeros_like(b.topk)

    def f(r, A, p=0, q=0):
        return {
            "none": 1,
            "cap": min(r, cap),
            "clamp": min(max(r, low), high),
            "band": (r if weighted else 1) * (low <= r <= high),
            "ipo": min(r, cap) * (abs(p - q) <= eps),
            "clip": r * (r <= 1 + eps_high if A > 0 else r >= 1 - eps_low if A < 0 else True),
        }[mode]

    for i, A in enumerate(b.A):
        p, q = np.exp(b.topk[i, :columns]), np.exp(b.topk_mu[i, :columns])
        own, own_mu = np.exp(b.logp[i]), np.exp(b.mu[i])
        absent = np.flatnonzero(np.isneginf(b.topk[i, :columns]))
        p[absent], q[absent] = own, own_mu
        rho = max(1 - q.sum(), 1e-6) / max(1 - p.sum(), 1e-6)
        c = [y * f(x / y, A, x, y) - rho * f(1 / rho, A) * x for x, y in zip(p, q, strict=True)]
        if placebo:
            c = np.roll(c, -1 - int(b.uniform[i] * (len(c) - 1)))
        w[i] = A * f(own / own_mu, A, own, own_mu)
        S[i] = w[i] * b.logp[i]
        for v, x in enumerate(c):
            S[i] -= A * x * np.log(p[v])
            if v in absent:
                w[i] -= A * x
            else:
                head[i, v] = -A * x
    return S, w, head


MORE = {
    f.__name__: f
    for f in (
        asympo,
        centering,
        cispo,
        decoupled,
        drpo,
        estr,
        gmpo,
        m2po,
        minirl,
        mis,
        opsm,
        oracle,
        sapo,
        sat_open,
        seqclip,
        spo,
        spo_scaled,
        two_factor,
        vaco,
        vcpo,
    )
}
