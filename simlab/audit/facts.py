"""What the alarms read, and their thresholds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simlab.audit.blocks import blocks, gaps
from simlab.audit.checks import Check
from simlab.token_log.tokens import Tokens

LEAST = 16  # responses that can show what is a matter of chance


class Limits(NamedTuple):
    """Thresholds of the alarms."""

    errors: float = 5.0  # standard errors of drift, first token and age
    learned: float = 4.0  # standard errors of what the trainer knows and the engine should
    drift: float = 0.5  # relative change of d_bar over the steps
    mult_prob_error: float = 1.05
    ess: float = 0.5
    far: float = 0.01  # share of tokens with |d| above 1 nat
    first: float = 3.0  # d_bar of the first token over that of the others
    weight: float = 10.0  # largest gradient weight under PPO
    flat_groups: float = 0.95  # share of groups that teach nothing
    odd: float = 3.0  # gaps of one of three scores over the gap of the two others
    repeat: float = 1e-3  # mean nats between two scores of one side
    noise_cut: float = 0.05  # share of tokens that a method cuts though no policy has moved


class Facts(NamedTuple):
    """What the alarms read."""

    t: Tokens
    tokens: np.ndarray  # [n] that are measured
    d: np.ndarray  # [n] nats
    engine: np.ndarray | None  # [n] nats: the part of d that is the engine's, NaN where unknown
    numbers: dict[str, float]
    by: dict[str, list[dict]]
    methods: list[dict]


def quiet(
    metric: str, asked: str, value: float | None, threshold: float | None, null: str
) -> Check:
    return Check(metric, "quiet", asked, value, threshold, null)


def cannot(metric: str, why: str) -> Check:
    return Check(metric, "not computable", why)


def engine_part(t: Tokens, tokens: np.ndarray) -> np.ndarray | None:
    """The part of d `[n]` that is the engine's, NaN where it is unknown; None if it is nowhere known."""
    before = t.extra.get("before")
    if before is not None:
        part = before[tokens] - t.rollout[tokens].astype(float)
    elif t.version is not None and t.trained is not None:
        young = t.version[tokens] == t.trained[tokens]
        part = np.where(young, gaps(t, tokens), np.nan)
    else:
        return None
    return part if np.isfinite(part).any() else None


def shared(t: Tokens, tokens: np.ndarray, d: np.ndarray) -> tuple[int, float | None]:
    """Responses, and variance of the mean gap of one over that of independent tokens; 1 if they are independent."""
    R, mean, square, at = len(t.row), float(d.mean(dtype=float)), 0.0, 0
    count, sums = np.zeros(R, dtype=np.int64), np.zeros(R)
    for block in blocks(t, tokens):
        r, z = t.responses[block], d[at : at + len(block)] - mean
        first, at = int(r[0]), at + len(block)
        own = np.bincount(r - first)
        count[first : first + len(own)] += own
        sums[first : first + len(own)] += np.bincount(r - first, z)
        square += float((z.astype(float) ** 2).sum())
    some = count > 0
    expected = float((square / len(d) / count[some]).mean())
    means = sums[some] / count[some]
    return int(some.sum()), float((means**2).mean()) / expected if expected else None
