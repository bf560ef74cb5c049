"""The two rules behind every verdict: does an arm fail as often as the reference, and is it level with it.

Both work on arrays of final scores: S seeds, C comparisons (an arm in a group), D draws of the reference.
`pool` is [S, C, D], NaN where a draw is not there. Their error rates and power are measured by
study/power.py on runs of this project (reports/power).
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from simlab.study.intervals import median_interval

ALPHA = 0.05  # chance of one false verdict or more on a page, for each of the two questions
HALF = ALPHA / 2  # for each of the two rules of the level: the mean's, the median's
LEAST = 6  # seeds on which both must have lived for a comparison of levels
FLIPS = 9999


class Answers(NamedTuple):
    """What the rules say of C comparisons; p-values and intervals hold for all of them at once."""

    risk_p: np.ndarray
    fail_reference: np.ndarray  # share of the pooled reference's runs that failed
    compared: np.ndarray  # seeds on which both lived
    gain: np.ndarray  # mean difference on those; NaN below LEAST of them
    gain_low: np.ndarray
    gain_high: np.ndarray
    gain_p: np.ndarray
    typical: np.ndarray  # median difference on those, with its exact interval
    typical_low: np.ndarray
    typical_high: np.ndarray
    side: np.ndarray  # of the level: 1 above, -1 below, 0 not separated


def answer(
    arm: np.ndarray, pool: np.ndarray, bar: float, rng: np.random.Generator, flips: int = FLIPS
) -> Answers:
    """Both questions for finals `arm` [S, C] against `pool` [S, C, D]; a final below `bar` is a failure."""
    there, failed = ~np.isnan(pool), arm < bar
    reference = (pool < bar) & there
    risk = holm(failure_p(failed, reference.sum(-1), there.sum(-1)))
    share = reference.sum((0, 2)) / there.sum((0, 2))
    mean, median = survivors(arm, pool, bar)
    gain, low, high, gain_p = max_t(mean, rng, flips)
    level = 1 - HALF / arm.shape[1]
    typical = np.array([median_interval(x[~np.isnan(x)], level) for x in median.T])
    exact = np.where(typical[:, 1] > 0, 1, np.where(typical[:, 2] < 0, -1, 0))
    by_mean = np.where(gain_p <= HALF, np.sign(gain), 0)
    side = np.where(exact * by_mean < 0, 0, np.sign(exact + by_mean))
    compared = (~np.isnan(mean)).sum(0)
    middle, bottom, top = typical.T
    return Answers(risk, share, compared, gain, low, high, gain_p, middle, bottom, top, side)


def survivors(arm: np.ndarray, pool: np.ndarray, bar: float) -> tuple[np.ndarray, np.ndarray]:
    """Final minus that of one draw, and minus a median of draws, `[S, C]`, of draws that did not fail.

    NaN where the arm failed or all draws did. Both are fair however skewed finals are, as the mean of
    the draws is not: minus the first draw that lived, either sign is as likely for an arm that does
    what the reference does; and it is above the median of an odd number of draws half of the time (the
    last of an even number is left out).
    """
    lived = pool >= bar
    count = lived.sum(-1, keepdims=True)
    odd = lived & ((count % 2 == 1) | (lived.cumsum(-1) < count))
    one = np.take_along_axis(pool, lived.argmax(-1)[..., None], -1)[..., 0]
    with warnings.catch_warnings(action="ignore"):  # of no draws
        median = np.nanmedian(np.where(odd, pool, np.nan), -1)
    both = (arm >= bar) & lived.any(-1)
    return np.where(both, arm - one, np.nan), np.where(both, arm - median, np.nan)


def failure_p(failed: np.ndarray, reference: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Exact two-sided p-values `[C]` of "the arm fails as often as the reference", given who failed.

    `failed` bool [S, C]; `reference` and `draws` [S, C] count the reference's failures and draws. The
    1 + draws runs of a seed are exchangeable under the hypothesis, so the arm is among its k failures
    with probability k / (1 + draws), and its number of failures over seeds is a sum of such coins
    (Poisson-binomial). With one draw this is McNemar's exact test.
    """
    chance = (failed + reference) / (1 + draws)
    mass = np.zeros((len(failed) + 1, failed.shape[1]))
    mass[0] = 1
    for p in chance:
        mass[1:] = mass[1:] * (1 - p) + mass[:-1] * p
        mass[0] *= 1 - p
    count = np.arange(len(mass))[:, None]
    seen = failed.sum(0)
    fewer, more = (np.where(side, mass, 0).sum(0) for side in (count <= seen, count >= seen))
    return np.minimum(1, 2 * np.minimum(fewer, more))


def holm(p: np.ndarray) -> np.ndarray:
    """P-values adjusted for all of them at once (Holm's step-down), in the order given."""
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    out = np.empty_like(adjusted)
    out[order] = np.minimum(adjusted, 1)
    return out


def max_t(
    difference: np.ndarray, rng: np.random.Generator, flips: int = FLIPS
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means `[C]` of differences `[S, C]`, simultaneous intervals at 1 - HALF and p-values, by sign flips.

    Under the hypothesis a seed's differences are as likely with the other sign, all comparisons
    together, which keeps their dependence; the largest |t| over the page is compared with the largest
    after flips, each t on the scale of a normal deviate (Wallace 1959), so that comparisons with
    fewer seeds count alike. All sign patterns are tried where there are fewer than `flips`. NaN is a
    seed that is not compared; a column with fewer than LEAST is left out and gets NaN.
    """
    there = ~np.isnan(difference)
    n = there.sum(0)
    tried = n >= LEAST
    mean, low, high, p = (np.full(len(n), np.nan) for _ in range(4))
    if not tried.any():
        return mean, low, high, p
    d, n = np.where(there, difference, 0)[:, tried], n[tried]
    squares = (d**2).sum(0)

    def deviate(total: np.ndarray) -> np.ndarray:
        """Of Student's t of a sum of n differences: 1 + t^2 / (n - 1) = 1 / (1 - total^2 / (n squares))."""
        share = np.divide(total**2, n * squares, out=np.zeros(total.shape), where=squares > 0)
        df = n - 1
        return (8 * df + 1) / (8 * df + 3) * np.sqrt(-df * np.log1p(-share.clip(max=1 - 1e-12)))

    sums = d.sum(0)
    seen = deviate(sums)
    largest = np.concatenate([[seen.max()], deviate(_signs(len(d), flips, rng) @ d).max(1)])
    p[tried] = (largest[:, None] >= seen * (1 - 1e-9)).mean(0)
    limit = np.sort(largest)[int(np.ceil((1 - HALF) * len(largest))) - 1]
    df, mean[tried] = n - 1, sums / n
    error = np.sqrt(np.maximum(squares - sums**2 / n, 0) / df / n)
    half = error * np.sqrt(df * np.expm1((limit * (8 * df + 3) / (8 * df + 1)) ** 2 / df))
    low[tried], high[tried] = mean[tried] - half, mean[tried] + half
    return mean, low, high, p


def _signs(seeds: int, flips: int, rng: np.random.Generator) -> np.ndarray:
    """Sign patterns `[<= flips, S]`: all but the given one up to a common sign, or a sample of them."""
    if 2 ** (seeds - 1) - 1 <= flips:
        bits = np.arange(1, 2 ** (seeds - 1))[:, None] >> np.arange(seeds) & 1
    else:
        bits = rng.integers(0, 2, (flips, seeds))
    return 1.0 - 2.0 * bits


# ---------------------------------------------------------------- what a page could have seen
def smallest_shift(difference: np.ndarray, comparisons: int, power: float = 0.8) -> float:
    """Shift of the level that a typical comparison of the page sees with this power; NaN where none is.

    From the median standard error over the comparisons, as if each stood alone at its share of the error.
    """
    n = (~np.isnan(difference)).sum(0)
    d = difference[:, n >= LEAST]
    if not d.shape[1]:
        return float("nan")
    error = np.nanmedian(np.nanstd(d, axis=0, ddof=1) / np.sqrt(n[n >= LEAST]))
    df = np.median(n[n >= LEAST]) - 1
    return float((student.isf(HALF / 2 / comparisons, df) + student.ppf(power, df)) * error)


def fewest_failures(
    seeds: int, draws: int, comparisons: int, rng: np.random.Generator, power: float = 0.8
) -> int | None:
    """The reference's failures in `seeds` runs against which no failure at all is seen with this power.

    Failures fall independently on seeds and draws. None where even a reference that always fails is
    not told from an arm that never does.
    """
    for failures in range(1, seeds + 1):
        k = rng.binomial(draws, failures / seeds, (1000, seeds))
        with np.errstate(divide="ignore"):
            p = 2 * np.exp(np.log1p(-k / (1 + draws)).sum(1))
        if (p <= ALPHA / comparisons).mean() >= power:
            return failures
    return None
