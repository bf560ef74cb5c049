"""Numpy oracles (see oracles.py) of the methods that came after the catalogue of the SAT paper."""

import numpy as np
from oracles_more import clip, response_mean, response_sum


def response_max(b, x):
    """The largest of the response, on each of its tokens."""
    return np.array([x[b.response == i].max() for i in b.response])


def luspo(b, eps_low=3e-4, eps_high=4e-4):
    S, w = clip(response_mean(b, b.logp - b.mu), b.A, 1 - eps_low, 1 + eps_high)
    T = response_sum(b, np.ones_like(S))
    return T * S, response_sum(b, w)


def vespo(b, k_pos=2, lam_pos=3, k_neg=3, lam_neg=2):
    W = np.exp(response_sum(b, b.logp - b.mu))
    k, lam = np.where(b.A < 0, k_neg, k_pos), np.where(b.A < 0, lam_neg, lam_pos)
    w = np.exp(lam) * W**k * np.exp(-lam * W) * b.A
    return w * b.logp, w


def trm(b, delta=0.01, statistic="k3", reduce="mean", anchor="prox", eps_low=0.2, eps_high=0.2):
    x = (b.prox if anchor == "prox" else b.logp) - b.mu
    D = x**2 / 2 if statistic == "k2" else np.exp(x) - 1 - x
    D = response_mean(b, D) if reduce == "mean" else response_max(b, D)
    S, w = clip(b.logp - (b.prox if anchor == "prox" else b.mu), b.A, 1 - eps_low, 1 + eps_high)
    return np.where(D <= delta, S, 0), np.where(D <= delta, w, 0)


def regression(b, tau=0.1, level="token"):
    d = b.logp - b.mu
    L = response_sum(b, d) if level == "sequence" else d
    T = response_sum(b, np.ones_like(d)) if level == "sequence" else 1
    return b.A * b.logp - tau / 2 * L**2 / T, b.A - tau * L


def opmd(b, tau=1):
    return b.A * b.logp / (1 + tau), b.A / (1 + tau)


def sis(b, lam=1, rejected="ratio"):
    r = np.exp(b.logp - b.mu)
    w = np.where(b.uniform < r / lam, 1, r if rejected == "ratio" else 0) * b.A
    return w * b.logp, w


def obrs(b, lam=1, cap=np.inf, calibrate=True):
    r = np.exp(b.logp - b.mu)
    a = np.minimum(1, r / lam)
    p, m = (np.exp(np.column_stack([x, y])) for x, y in ((b.topk, b.logp), (b.topk_mu, b.mu)))
    p, m = (np.column_stack([x, np.maximum(1 - x.sum(1), 0)]) for x in (p, m))
    Z = np.minimum(m, p / lam).sum(1)
    Z = Z * a.mean() / Z.mean() if calibrate else Z
    w = np.where(b.uniform < a, np.minimum(Z * np.maximum(r, lam), cap), 0) * b.A
    return w * b.logp, w


def covariance(b):
    apart = b.A - b.A.mean()
    return np.where(np.isclose(b.A, b.A.mean()), 0, apart) * (b.logp - b.logp.mean())


def clip_cov(b, rate=2e-4, low=1, high=5, eps_low=0.2, eps_high=0.2):
    S, w = clip(b.logp - b.mu, b.A, 1 - eps_low, 1 + eps_high)
    cov = covariance(b)
    open_ = (cov > low) & (cov < high) & ((w != 0) | (b.A == 0))
    places = np.flatnonzero(open_)
    n = max(int(rate * len(cov)), 1)
    gone = places[np.argsort(b.uniform[places])[:n]]
    S[gone], w[gone] = 0, 0
    return S, w


def kl_cov(b, rate=2e-4, coef=1):
    d = b.logp - b.mu
    S = np.exp(d) * b.A
    w = S.copy()
    cov = covariance(b)
    n = max(int(rate * len(d)), 1)
    held = cov > (np.sort(cov)[::-1][n] if n < len(d) else -np.inf)
    S[held] -= coef * np.abs(d[held])
    w[held] -= coef * np.sign(d[held])
    return S, w


def topr(b, sign="reward", level="sequence"):
    d = b.logp - b.mu
    r = np.exp(response_sum(b, d) if level == "sequence" else d)
    w = np.where((b.A if sign == "advantage" else b.reward) > 0, 1, np.minimum(r, 1)) * b.A
    return w * b.logp, w


def groups(b):
    """For each token: the indices of one token of each response to its prompt."""
    _, first = np.unique(b.response, return_index=True)
    return [first[b.group[first] == g] for g in b.group]


def oapl(b, beta1=1, beta2=1e-3, per_token=False):
    V = np.array([beta1 * np.log(np.exp(b.reward[i] / beta1).mean()) for i in groups(b)])
    d = b.logp - b.mu
    T = response_sum(b, np.ones_like(d))
    share = beta2 / T if per_token else beta2
    gap = b.reward - V - share * response_sum(b, d)
    return -(gap**2) / T, 2 * share * gap


def asymre(b, delta=-0.1, alone="formula"):
    level = np.array([b.reward[i].mean() + delta for i in groups(b)])
    if alone == "reward":
        level[[len(i) == 1 for i in groups(b)]] = 0
    return (b.reward - level) * b.logp, b.reward - level


def gepo(b):
    q = np.exp(response_mean(b, b.mu))
    E = np.array([(q[i] ** 2).sum() / q[i].sum() for i in groups(b)])
    S = np.exp(response_mean(b, b.logp)) / E * b.A
    return S, response_mean(b, S)


def earlier(b, i):
    """The tokens of the response up to token i."""
    return (b.response == b.response[i]) & (b.position <= b.position[i])


def ctpo(b, e_low=0.025, e_high=0.05, h=0.5, dual=None):
    d, each = b.logp - b.mu, range(len(b.logp))
    D = np.array([d[earlier(b, i)].sum() for i in each])
    t = np.array([earlier(b, i).sum() for i in each]) ** h
    S, w = clip(D, b.A, np.exp(-e_low * t), np.exp(e_high * t))
    if dual is not None:
        floor = np.where(b.A < 0, np.exp(dual * t) * b.A, -np.inf)
        S, w = np.maximum(S, floor), np.where(floor > S, 0, w)
    return S, w


def minpro(b, held=False, eps_low=0.2, eps_high=0.2):
    d = b.logp - b.mu
    least = np.zeros_like(d)
    for i in range(len(d)):
        before = d[earlier(b, i) & (np.arange(len(d)) != i)]
        least[i] = before.min() if len(before) else 0
    return clip(d + (np.minimum(least, 0) if held else least), b.A, 1 - eps_low, 1 + eps_high)


def mu_grpo(b, threshold=4, include_trigger=True, eps_low=0.2, eps_high=0.2):
    d = b.logp - b.mu
    out = np.abs(d) > np.log(threshold)
    seen = np.array([out[earlier(b, i)].sum() for i in range(len(d))])
    drop = (b.A < 0) & (seen > (0 if include_trigger else out))
    S, w = clip(d, b.A, 1 - eps_low, 1 + eps_high)
    return np.where(drop, 0, S), np.where(drop, 0, w)


def troll(b, eps=0.05, alpha=1, columns=None):
    S, w, head = np.zeros_like(b.A), np.zeros_like(b.A), np.zeros_like(b.topk)
    for i, A in enumerate(b.A):
        real = np.flatnonzero(~np.isneginf(b.topk[i, :columns]))
        p, q = (np.exp([*x[real], y]) for x, y in ((b.topk[i], b.logp[i]), (b.topk_mu[i], b.mu[i])))
        p, q = (np.append(x, max(1 - x.sum(), 1e-6)) for x in (p, q))
        p, q = p / p.sum(), q / q.sum()

        def near(t, p=p, q=q):
            y = p**t * q ** (1 - t)
            return y / y.sum()

        def far(t, q=q, near=near):
            return (near(t) * np.log(near(t) / q)).sum() > eps

        low, high = 0, 1
        for _ in range(60):
            low, high = (
                (low, (low + high) / 2) if far((low + high) / 2) else ((low + high) / 2, high)
            )
        t = low if far(1) else 1
        x = near(t)
        a = np.arange(len(p)) == len(real)
        r, kl = (x / q)[a][0], (p * np.log(p / x)).sum()
        S[i] = A * r - alpha * kl
        g = A * t * r * (a - x) - alpha * p * (np.log(p / x) - kl)
        g = g[:-1] - g[-1] / p[-1] * p[:-1]
        w[i], head[i, real] = g[-1], g[:-1]
    return S, w, head


REST = {
    f.__name__: f
    for f in (
        asymre, clip_cov, ctpo, gepo, kl_cov, luspo, minpro, mu_grpo, oapl, obrs, opmd,
        regression, sis, topr, trm, troll, vespo,
    )
}  # fmt: skip
