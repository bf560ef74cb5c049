"""Claim 14. The two-term split of d is exact; a finer one is not identified by the logs.

    d = log pi^(j) - log mu = [log pi^(j) - log pi^(l)] + [log pi^(l) - log mu]      SAT (2)
The terms are the policy part and the implementation part. They need log pi^(l), the trainer's score
at the rollout's weights: without it, world A (the policy moved by d, a perfect engine) and world B
(the policy stood still, the engine is off by d) write the same log. With it, the implementation part
splits no further: world A (router error e, kernel error i - e) and world B (router error e', kernel
error i - e') agree in every logged number for any e and e'. With shares of i between 0 and 1 a cause can be misjudged
by all of i. Existence is by construction; the code below builds the worlds and compares their logs.
"""

from __future__ import annotations

import numpy as np

from theory.search import Side

NUMBER, TITLE = 14, "What the logs identify"
STATEMENT = r"$d$ = policy part + implementation part; any finer split fits the same log"
SHAPES = [{"n": n} for n in (1, 5)]


def size(shape: dict) -> int:
    """log mu, the two parts, and two ways to split the second."""
    return 5 * shape["n"]


def decode(shape: dict, x: np.ndarray) -> dict:
    """Two worlds: the same log_mu, policy and implementation parts, different router shares."""
    log_mu, policy, impl, a, b = x.reshape(5, -1)
    a, b = 1 / (1 + np.exp(-a)), 1 / (1 + np.exp(-b))
    return {
        "log_mu": -np.exp(np.clip(log_mu, -3, 3)) - 10,
        "policy": policy,
        "impl": impl,
        "share_a": a,
        "share_b": b,
    }


def log_of(log_mu, policy, router, kernel) -> dict[str, np.ndarray]:
    """What a run writes: rollout score, trainer score at the rollout's weights, trainer score now."""
    before = log_mu + router + kernel
    return {"rollout": log_mu, "trainer_before": before, "trainer": before + policy}


def sides(instance: dict) -> list[Side]:
    """The split, equal logs of both pairs of worlds, and how far causes may differ."""
    x = {k: np.asarray(v) for k, v in instance.items()}
    router_a, router_b = x["share_a"] * x["impl"], x["share_b"] * x["impl"]
    a = log_of(x["log_mu"], x["policy"], router_a, x["impl"] - router_a)
    b = log_of(x["log_mu"], x["policy"], router_b, x["impl"] - router_b)
    d = x["policy"] + x["impl"]
    moved, engine = log_of(x["log_mu"], d, 0, 0), log_of(x["log_mu"], 0 * d, d, 0)
    two_columns = max(np.abs(moved[k] - engine[k]).max() for k in ("rollout", "trainer"))
    policy, impl = a["trainer"] - a["trainer_before"], a["trainer_before"] - a["rollout"]
    split = max(np.abs(policy - x["policy"]).max(), np.abs(impl - x["impl"]).max())
    return [
        Side("logs give policy and implementation part", float(split), 1e-9),
        Side("finer split: same logs", max(float(np.abs(a[k] - b[k]).max()) for k in a), 0.0, True),
        Side("without log pi^(l): same logs", float(two_columns), 0.0, True),
        Side(
            "misjudged cause <= all of it",
            float(np.abs(router_a - router_b).max()),
            float(np.abs(x["impl"]).max()),
        ),
    ]


def tight():
    """All router in one world, no router in the other."""
    one = np.ones(1)
    worlds = {
        "log_mu": -one,
        "policy": 0.1 * one,
        "impl": 0.2 * one,
        "share_a": one,
        "share_b": 0 * one,
    }
    return [(worlds, "misjudged cause <= all of it", 1.0)]
