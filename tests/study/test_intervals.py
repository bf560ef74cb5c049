"""Coverage of the intervals by simulation, on the shapes that differences of final J really have."""

import numpy as np
import pytest
from scipy import stats

from simlab.study.intervals import (
    improvement,
    mean_interval,
    median_interval,
    middle_mean,
    profile,
    share_interval,
)

TRIALS = 1000


def shapes(rng, n):
    """Paired differences: Gaussian; skewed; a seventh of the seeds collapsed in one arm; in both."""
    calm = 0.02 * rng.standard_normal(n)
    return {
        "gaussian": (0.01 + calm, 0.01),
        "skewed": (0.05 * rng.exponential(size=n), 0.05),
        "one arm collapses": (calm - 0.6 * (rng.random(n) < 1 / 7), -0.6 / 7),
        "both collapse": (calm + 0.6 * ((rng.random(n) < 0.3) * 1.0 - (rng.random(n) < 0.3)), 0.0),
    }


@pytest.mark.parametrize(
    ("shape", "least"),
    [("gaussian", 0.935), ("skewed", 0.90), ("one arm collapses", 0.87), ("both collapse", 0.935)],
)
def test_t_interval_covers(shape, least):
    """At 24 seeds a 95 % interval covers the truth about as often as it says; collapse costs some."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(TRIALS):
        sample, truth = shapes(rng, 24)[shape]
        _, low, high = mean_interval(sample)
        hits += low <= truth <= high
    assert least <= hits / TRIALS <= 0.985


@pytest.mark.parametrize("level", [0.95, 1 - 0.05 / 52])
@pytest.mark.parametrize("drop", [0.0, 1 / 24, 0.3])
def test_median_interval_covers_whatever_the_tail(level, drop):
    """The interval that verdicts rest on misses no more often than it says, rare collapses included."""
    rng, misses, trials = np.random.default_rng(1), 0, 1500
    truth = stats.norm.ppf((0.5 - drop) / (1 - drop)) if drop else 0.0
    for _ in range(trials):
        sample = rng.standard_normal(24) - 90 * (rng.random(24) < drop)
        _, low, high = median_interval(sample, level)
        misses += not low <= truth <= high
    assert stats.binomtest(misses, trials, 1 - level, alternative="greater").pvalue > 1e-3


def test_median_interval_by_hand():
    """24 values, 95 %: the 7th and the 18th; 3 values allow no bound at that level."""
    x = np.arange(24.0)
    assert median_interval(x) == (11.5, 6.0, 17.0)
    assert median_interval(np.array([1.0, 2.0, 3.0])) == (2.0, -np.inf, np.inf)


@pytest.mark.parametrize("p", [0.02, 0.14, 0.5])
def test_binomial_interval_covers_at_least_its_level(p):
    """Clopper-Pearson never undercovers: summed over every outcome, exactly."""
    n = 24
    inside = [
        stats.binom.pmf(k, n, p)
        for k in range(n + 1)
        if share_interval(k, n)[1] <= p <= share_interval(k, n)[2]
    ]
    assert sum(inside) >= 0.95


def test_hand_numbers():
    """Case C088's arms, a t interval by hand, and 0 of 24."""
    centre, low, high = mean_interval(np.array([0.30, 0.35, 0.39]))
    half = stats.t.ppf(0.975, 2) * 0.0450925 / np.sqrt(3)
    assert (centre, low, high) == pytest.approx(
        (0.3466667, 0.3466667 - half, 0.3466667 + half), abs=1e-6
    )
    share, low, high = share_interval(0, 24)
    assert (share, low) == (0, 0)
    assert high == pytest.approx(1 - 0.025 ** (1 / 24))
    flat = mean_interval(np.array([0.5, 0.5, 0.5]))
    assert flat == (0.5, 0.5, 0.5)


def test_rliables_numbers_by_hand():
    """Middle half of eight runs; wins with half a point for a tie; the share of runs above a level."""
    rng = np.random.default_rng(0)
    x = np.array([9.0, 1, 2, 3, 4, 5, 6, -50])
    middle, low, high = middle_mean(x, rng)
    assert middle == (2 + 3 + 4 + 5) / 4
    assert low < middle < high
    share, low, high = improvement(np.array([1.0, 3.0]), np.array([1.0, 2.0, 0.0]), rng)
    assert share == pytest.approx((0.5 + 0 + 1 + 3) / 6)
    assert 0 <= low < share < high <= 1
    y = rng.normal(size=30)
    u = stats.mannwhitneyu(x, y).statistic
    assert improvement(x, y, rng)[0] == pytest.approx(u / 240)
    assert profile(x, np.array([-99, 2, 4.5])).tolist() == [1, 5 / 8, 3 / 8]


@pytest.mark.parametrize("statistic", [middle_mean, improvement])
@pytest.mark.slow
def test_bootstrap_intervals_cover(statistic):
    """At 24 runs a percentile bootstrap of a symmetric sample covers 95 % within its usual shortfall."""
    rng, hits = np.random.default_rng(3), 0
    for _ in range(200):
        more = () if statistic is middle_mean else (rng.normal(size=72),)
        _, low, high = statistic(rng.normal(size=24), *more, rng)
        hits += low <= (0 if statistic is middle_mean else 0.5) <= high
    assert 0.88 <= hits / 200 <= 0.99
