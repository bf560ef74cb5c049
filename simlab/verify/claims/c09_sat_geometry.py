"""Claim 9. Proposition 4.1 of SAT and its one-step corollary, on the registry's own SAT and PPO (GSPO).

For one token with ratio r, advantage A, and contraction c in (0, 1] on the side of sign(log r):
 (i)   I_SAT is inside I_PPO, one end strictly when the gate is open, the other end unchanged;
 (ii)  S_SAT(r, A) <= S_PPO(r, A): on A > 0 it is A min(r, .) with a smaller cap, on A < 0
       A max(r, .) with a larger floor;
 (iii) away from kinks the derivatives in r differ exactly on {A > 0, 1 + eh c_+ < r < 1 + eh} and
       {A < 0, 1 - el < r < 1 - el c_-}, where SAT's is 0 and PPO's is A;
 one step r_+ = r + eta dS/dr then has |r_+ - 1| smaller under SAT on these bands, else equal.
Proof: an open gate has u > q, hence 0 < c < 1/2 (i); (ii) as said; (iii) by (ii) each S is A r up to its
limit and constant beyond, so the two differ in slope between the two limits and nowhere else.
q is (14), the least x with at least a share alpha of |d| at or below x: one of the |d|, nothing in between.
At sequence level (20) the mean log-ratio of the response takes the place of d in all of it.
S, slopes (by autograd, q and c constant), radii and q are the registry's; c and the bands are the formulas.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from simlab.core.tokens import TokenBatch
from simlab.stabilizers import gspo, ppo, sat
from theory.search import Side

NUMBER, TITLE = 9, "SAT's update geometry"
STATEMENT = r"$I_{SAT} \subseteq I_{PPO}$, $S_{SAT}(r, A) \le S_{PPO}(r, A)$, the slopes differ exactly between the two limits, outward steps are smaller there"
SHAPES = [
    {"n": n, "scale": s, "per": per} for n, per in ((10, 1), (40, 1), (40, 3)) for s in (0.03, 0.3)
]
ETA, NEAR, ALPHA = 1e-4, 1e-12, 0.9


def size(shape: dict) -> int:
    """Log-ratios and advantages, one radius each."""
    return 2 * shape["n"] + 2


def decode(shape: dict, x: np.ndarray) -> dict:
    """{"d", "A", "el", "eh", "response"}: a batch with heavy tails (x cubed), in responses of 1, `per`,
    1, `per`, ... tokens with one advantage each."""
    n = shape["n"]
    radii = 0.02 + 0.4 / (1 + np.exp(-x[2 * n :]))
    d = shape["scale"] * (x[:n] + x[:n] ** 3 / 3)
    response = np.repeat(np.arange(n), np.resize([1, shape["per"]], n))[:n]
    batch = {
        "d": np.clip(d, -3, 3),
        "A": x[n : 2 * n][response],
        "response": response.astype(float),
    }
    return batch | {"el": float(radii[0]), "eh": float(radii[1])}


def run(instance: dict, method: ModuleType | SimpleNamespace = sat) -> SimpleNamespace:
    """What `method` and the loss below it (PPO or GSPO) make of a batch, and the definition of SAT.

    d is the score, the token's or its response's. S, slope (dS/dr), low, high: of the method; S_base,
    slope_base: of the loss below; q: the registry's; q_own, c_low, c_high: (14)-(16) by the formulas.
    """
    response = np.unique(np.asarray(instance["response"]), return_inverse=True)[1]
    d, A, el, eh = (np.asarray(instance[name], float) for name in ("d", "A", "el", "eh"))
    counts = np.bincount(response)
    A = A[np.unique(response, return_index=True)[1]][response]  # one a response
    level = "token" if (counts == 1).all() else "sequence"
    logp = torch.tensor(d, requires_grad=True)
    b = TokenBatch(
        logp=logp,
        logp_mu=torch.zeros(len(d), dtype=torch.float64),
        advantage=torch.tensor(A),
        mask=torch.ones(len(d), dtype=torch.bool),
        response=torch.from_numpy(response),
    )
    radii = {"eps_low": float(el), "eps_high": float(eh)}
    stats = method.whole_batch([b], level=level)
    own = method.surrogate(b, **stats, level=level, **radii)
    base = (ppo if level == "token" else gspo).surrogate(b, **radii)
    d = (np.bincount(response, d) / counts)[response]
    (slope,), (slope_base,) = (torch.autograd.grad(x.S.sum(), logp) for x in (own, base))
    u = np.abs(d)
    q = min(x for x in u if (u <= x).mean() >= ALPHA)
    gate = (q > 0) & (u > q)
    c = np.where(gate, 1 / (1 + (u / max(q, 1e-300)) ** 2), 1.0)
    return SimpleNamespace(
        d=d, A=A, r=np.exp(d), el=el, eh=eh, q=stats["q"].item(), q_own=q, gate=gate,
        c_low=np.where(d < 0, c, 1.0), c_high=np.where(d > 0, c, 1.0),
        S=own.S.detach().numpy(), S_base=base.S.detach().numpy(),
        slope=slope.numpy() / np.exp(d), slope_base=slope_base.numpy() / np.exp(d),
        low=1 - own.diagnostics["radius_low"].value.numpy(),
        high=1 + own.diagnostics["radius_high"].value.numpy(),
    )  # fmt: skip


def none(name: str, breaches: np.ndarray | bool) -> Side:
    """A number of breaches that must be 0."""
    return Side(name, float(np.sum(breaches)), 0.0, True)


def sides(instance: dict, method: ModuleType | SimpleNamespace = sat) -> list[Side]:
    """Numbers of breaches, all of which must be 0, the quantile, and the largest gate rate and factor."""
    x = run(instance, method)
    low, high = 1 - x.el * x.c_low, 1 + x.eh * x.c_high  # (17)
    value = np.minimum(x.r * x.A, np.clip(x.r, low, high) * x.A)  # (19)
    limits = np.stack(np.broadcast_arrays(low, high, 1 - x.el, 1 + x.eh))
    smooth = (np.abs(x.r - limits) > NEAR).all(0) & (np.abs(x.A) > 1e-6)
    band = ((x.A > 0) & (x.r > high) & (x.r < 1 + x.eh)) | (
        (x.A < 0) & (x.r < low) & (x.r > 1 - x.el)
    )
    up = (x.high < 1 + x.eh - NEAR) != (x.gate & (x.d > 0) & (x.eh > 0))
    down = (x.low > 1 - x.el + NEAR) != (x.gate & (x.d < 0) & (x.el > 0))
    outside = (x.high > 1 + x.eh + NEAR) | (x.low < 1 - x.el - NEAR)
    size_A = np.abs(x.A)
    differ = np.abs(x.slope - x.slope_base) > size_A / 2
    gap = np.where(
        band,
        np.abs(x.slope) + np.abs(x.slope_base - x.A),
        np.abs(x.slope - x.slope_base),
    )
    step, step_base = (np.abs(x.r + ETA * s - 1) for s in (x.slope, x.slope_base))
    less = step < step_base - ETA * size_A / 2
    wrong_value = np.abs(x.S - value) > 1e-9 * (1 + np.abs(value))
    return [
        Side("(14): q is an order statistic", x.q, x.q_own, True),
        none("(19): S is min(r A, clip(r) A)", wrong_value),
        none("(i) only the gated end moves, inward", up | down | outside),
        none("(ii) S_SAT <= S_PPO", x.S > x.S_base + 1e-12 * (1 + np.abs(x.S_base))),
        none("(iii) slopes differ on the bands only", (differ != band)[smooth]),
        none("(iii) slopes are 0 and A there", (gap > 1e-3 * size_A)[smooth]),
        none("one step: smaller iff on a band", (less != band)[smooth]),
        Side("gate rate <= 1 - alpha", float(x.gate.mean()), 1 - ALPHA),
        Side(
            "an open gate has c < 1/2",
            float(np.where(x.gate, x.c_low * x.c_high, 0).max()),
            0.5,
        ),
    ]


def ladder(n: int, per: int = 1) -> dict:
    """Distinct gaps 0.01, 0.02, ... of responses of `per` tokens, all outward."""
    d = np.repeat(np.arange(1, n + 1) / 100, per)
    response = np.repeat(np.arange(n), per).astype(float)
    return {"d": d, "A": np.ones(n * per), "response": response, "el": 0.2, "eh": 0.2}


def tight():
    """Ten distinct gaps, of tokens or of responses: exactly one is gated."""
    name = "gate rate <= 1 - alpha"
    return [(ladder(10), name, 1.0), (ladder(10, 2), name, 1.0)]
