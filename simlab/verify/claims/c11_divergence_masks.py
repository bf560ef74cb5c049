"""Claim 11. What coarse divergences see: DPPO's orderings, Pinsker, and the bands of KPop and IcePop, on the
registry's own DPPO and KPop.

For events coarsened to {a} against the rest (Binary), or to TopK(mu) + {a} + rest (TopK):
    Binary-TV <= TopK-TV <= TV,   Binary-KL <= TopK-KL <= KL(mu || pi),   2 TV^2 <= KL(mu || pi)
(data processing: merging events never increases an f-divergence; the binary TV |p - m| needs no
1/2). The KL is that of mu to pi: it is infinite where pi misses a token of mu, and where mu misses one
of pi it is not. KPop's forward test is the other way round, D(pi || mu). KPop accepts p iff both Bernoulli KLs to m are at most phi: each is 0 at p = m and increases
away from it, so the accepted set is an interval around m; in ratios, [0.574, 1.43] at phi = 0.1 and
m = 1/2, but [1.7e-5, 8.05] at m = 0.01: nearly one-sided. IcePop's band is [low m, high m].
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from scipy.optimize import brentq

from simlab.core.tokens import TokenBatch
from simlab.stabilizers import dppo, kpop
from simlab.verify.claims.c09_sat_geometry import none
from theory.search import Side
from theory.tables import softmax, tv

NUMBER, TITLE = 11, "Divergence masks"
STATEMENT = r"Binary $\le$ TopK $\le$ full for $D_{TV}$ and $KL(\mu \| \pi)$; $2 D_{TV}^2 \le KL(\mu \| \pi)$; KPop accepts an interval around $\mu(a)$"
SHAPES = [
    {"V": V, "K": K, "phi": phi} for V, K in ((3, 1), (6, 2), (10, 4)) for phi in (0.001, 0.1)
]


def size(shape: dict) -> int:
    """Logits of mu and their change."""
    return 2 * shape["V"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"mu", "p", "K", "phi"}; the sampled action is the last one."""
    V = shape["V"]
    x = np.clip(x, -12, 12)  # no probability underflows
    both = {"mu": softmax(x[:V]), "p": softmax(x[:V] + x[V:])}
    return both | {"K": shape["K"], "phi": shape["phi"]}


def kl(m: np.ndarray, p: np.ndarray) -> float:
    """KL(m || p) in nats, p > 0."""
    on = m > 0
    return float((m[on] * np.log(m[on] / p[on])).sum())


def merged(x: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Kept events, then everything else as one."""
    return np.append(x[keep], x[~keep].sum())


def bernoulli_kl(p: float, q: float) -> float:
    """D_B(p || q) in nats for probabilities inside (0, 1)."""
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def kpop_band(m: float, phi: float) -> tuple[float, float]:
    """The interval of p that KPop accepts at mu(a) = m, within [1e-12, 1 - 1e-12]."""

    def excess(p: float) -> float:
        return max(bernoulli_kl(p, m), bernoulli_kl(m, p)) - phi

    tiny = 1e-12
    low = brentq(excess, tiny, m, xtol=1e-16) if excess(tiny) > 0 else tiny
    high = brentq(excess, m, 1 - tiny, xtol=1e-16) if excess(1 - tiny) > 0 else 1 - tiny
    return low, high


def tables(mu: np.ndarray, p: np.ndarray, K: int) -> dict[str, torch.Tensor]:
    """What DPPO and KPop read of the sampled action, the last one, as a batch of one token."""
    a = len(mu) - 1
    top = np.argsort(-mu, kind="stable")[: int(K)]
    with np.errstate(divide="ignore"):
        logs = [np.log(x) for x in (p, mu)]
    heads = [np.where(top == a, -np.inf, x[top]) for x in logs]
    logp, logm = (torch.tensor(x[a : a + 1]) for x in logs)
    topk, topk_mu = (torch.tensor(x).unsqueeze(0) for x in heads)
    return {"logp": logp, "logm": logm, "topk": topk, "topk_mu": topk_mu}


def passes(own: ModuleType | SimpleNamespace, p: float, m: float, phi: float, way: str) -> bool:
    """Whether KPop keeps a token of probability p under pi and m under mu."""
    one = torch.ones(1, dtype=torch.float64)
    b = TokenBatch(
        logp=one * np.log(p),
        logp_mu=one * np.log(m),
        advantage=one,
        mask=one > 0,
        response=torch.zeros(1, dtype=torch.int64),
    )
    out = own.surrogate(b, phi=float(phi), direction=way)
    return not out.diagnostics["out_of_band"].value.item()


def sides(
    instance: dict,
    masks: ModuleType | SimpleNamespace = dppo,
    band: ModuleType | SimpleNamespace = kpop,
) -> list[Side]:
    """Both chains and Pinsker; DPPO's divergences and KPop's tests against theirs."""
    mu, p = np.asarray(instance["mu"]), np.asarray(instance["p"])
    a, phi = len(mu) - 1, instance["phi"]
    binary = np.arange(len(mu)) == a
    top = binary.copy()
    top[np.argsort(-mu, kind="stable")[: instance["K"]]] = True
    levels = [(merged(mu, keep), merged(p, keep)) for keep in (binary, top)] + [(mu, p)]
    tvs, kls = [float(tv(*x)) for x in levels], [kl(*x) for x in levels]
    m, q = float(np.clip(mu[a], 1e-7, 1 - 1e-7)), float(np.clip(p[a], 1e-7, 1 - 1e-7))
    low, high = kpop_band(m, phi)
    accepted, forward = (passes(band, q, m, phi, way) for way in ("both", "forward"))
    near = min(abs(q / low - 1), abs(q / high - 1)) < 1e-7
    ahead = bernoulli_kl(q, m)
    own = tables(mu, p, instance["K"])
    logs, rest = (own["logp"], own["logm"]), (1 - mu[a]) / max(1 - p[a], 1e-300)
    binary_kl = masks.binary("kl", *logs).item()
    top_tv, top_kl = (masks.top_k(f"topk_{x}", **own).item() for x in ("tv", "kl"))
    rest_mu, rest_pi = (x[-1] for x in levels[1])
    slack = 1e-9 + 4e-12 * rest_mu / max(rest_pi, 1e-300)  # DPPO's floor of 1e-12 on the rest
    return [
        Side("Binary-TV = |pi - mu|", tvs[0], abs(p[a] - mu[a]), True),
        Side("DPPO: Binary-TV", masks.binary("tv", *logs).item(), tvs[0], True),
        none("DPPO: Binary-KL is KL(mu || pi)", abs(binary_kl - kls[0]) > 2e-8 * (1 + rest)),
        none("DPPO: TopK-TV", abs(top_tv - tvs[1]) > 1e-9),
        none("DPPO: TopK-KL is KL(mu || pi)", abs(top_kl - kls[1]) > slack),
        Side("Binary-TV <= TopK-TV", tvs[0], tvs[1]),
        Side("TopK-TV <= TV", tvs[1], tvs[2]),
        Side("Binary-KL <= TopK-KL", kls[0], kls[1]),
        Side("TopK-KL <= KL", kls[1], kls[2]),
        Side("2 TV^2 <= KL", 2 * tvs[2] ** 2, kls[2]),
        none("KPop = its interval", not near and accepted != (low <= q <= high)),
        none("KPop forward is D(pi || mu)", abs(ahead - phi) > 1e-7 and forward != (ahead <= phi)),
    ]


def tight():
    """Three tokens, K = 1: the top token, the sampled one and the rest are everything. A policy that hardly
    moves: KL is 2 TV^2 to first order where mu is even. KPop's two directions apart: D(pi || mu) is above
    0.1, D(mu || pi) below."""
    mu, p = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.3, 0.2])
    near = {"mu": np.array([0.5, 0.3, 0.2]), "p": np.array([0.49, 0.306, 0.204])}
    apart = {"mu": np.array([0.6, 0.35, 0.05]), "p": np.array([0.5, 0.3, 0.2])}
    return [
        ({"mu": mu, "p": p, "K": 1, "phi": 0.1}, "TopK-TV <= TV", 1.0),
        (near | {"K": 1, "phi": 0.1}, "2 TV^2 <= KL", 0.9996),
        (apart | {"K": 1, "phi": 0.1}, "TopK-TV <= TV", 1.0),
    ]
