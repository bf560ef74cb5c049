"""Intervals and rliable's aggregates, from scipy; coverage is tested by simulation in tests/study/test_intervals.py."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy import special, stats

RESAMPLES = 1000


def mean_interval(x: np.ndarray, level: float = 0.95) -> tuple[float, float, float]:
    """Mean and Student-t interval of a sample of one value per seed; n >= 2.

    At 24 seeds it covers 95 % for Gaussian and symmetric samples, about 90 % when one seed in seven
    fails, and far less when one in twenty-four does: no verdict rests on it.
    """
    x = np.asarray(x, dtype=float)
    centre, half = x.mean(), stats.t.ppf((1 + level) / 2, len(x) - 1) * stats.sem(x)
    return float(centre), float(centre - half), float(centre + half)


def median_interval(x: np.ndarray, level: float = 0.95) -> tuple[float, float, float]:
    """Median and the exact interval of the population's median: a pair of order statistics.

    It inverts the sign test and covers at least `level` for every distribution. With too few values
    for the level it is (-inf, inf); the median of none is NaN.
    """
    x = np.sort(np.asarray(x, dtype=float))
    n = len(x)
    if not n:
        return float("nan"), -np.inf, np.inf
    k = _rank(n, level)
    low, high = (x[k - 1], x[n - k]) if k else (-np.inf, np.inf)
    return float(np.median(x)), float(low), float(high)


@lru_cache
def _rank(n: int, level: float) -> int:
    """The largest k such that fewer than k of n lie below the median with at most half of 1 - level."""
    return int(stats.binom.ppf((1 - level) / 2, n, 0.5))


def share_interval(k: int, n: int, level: float = 0.95) -> tuple[float, float, float]:
    """k / n and the exact (Clopper-Pearson) binomial interval."""
    tail = (1 - level) / 2
    low = special.betaincinv(k, n - k + 1, tail) if k else 0.0
    high = special.betaincinv(k + 1, n - k, 1 - tail) if k < n else 1.0
    return k / n, float(low), float(high)


def columns(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    """An interval as three columns of a table: name, name_low, name_high."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


# ---------------------------------------------------------------- rliable (Agarwal et al. 2021, 2108.13264)
def middle_mean(x: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """Interquartile mean of runs: the mean of the middle half, with a 95 % percentile bootstrap."""
    x = np.asarray(x, dtype=float)
    again = stats.trim_mean(rng.choice(x, (RESAMPLES, len(x))), 0.25, axis=1)
    return float(stats.trim_mean(x, 0.25)), *_middle(again)


def improvement(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator
) -> tuple[float, float, float]:
    """P(a run of x is above a run of y), ties half, with a 95 % percentile bootstrap over both."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    wins = np.heaviside(x[:, None] - y, 0.5)
    weight_x, weight_y = (
        rng.multinomial(len(z), np.full(len(z), 1 / len(z)), RESAMPLES) / len(z) for z in (x, y)
    )
    again = np.einsum("bi,ij,bj->b", weight_x, wins, weight_y, optimize=True)
    return float(wins.mean()), *_middle(again)


def profile(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Performance profile: the share of runs above each level."""
    return (np.asarray(x, dtype=float)[:, None] > np.asarray(levels)).mean(0)


def _middle(again: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(again, [2.5, 97.5])
    return float(low), float(high)
