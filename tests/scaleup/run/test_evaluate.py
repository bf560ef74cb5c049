"""avg@k and pass@k: numbers by hand, coverage by simulation."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from scaleup.run.evaluation import avg_at_k, pass_at_k
from simlab.study.intervals import mean_interval


def test_avg_by_hand():
    """Three problems, two samples, two repeats."""
    x = [[[1, 0], [1, 1], [0, 0]], [[1, 1], [0, 1], [0, 0]]]
    s = avg_at_k(x)
    assert s.avg == pytest.approx((3 / 4 + 3 / 4 + 0) / 3)
    assert s.each == pytest.approx((0.5, 0.5))
    assert (s.problems, s.samples, s.repeats) == (3, 2, 2)
    # problem means 0.75, 0.75, 0: mean 0.5, sd 0.4330, t(2) = 4.303, half width 1.0757
    assert (s.low, s.high) == (0.0, 1.0)
    # variances of four samples 1/4, 1/4, 0: sqrt((1/4 + 1/4) / 4) / 3
    assert s.noise == pytest.approx(np.sqrt(0.5 / 4) / 3)


def test_interval_by_hand():
    """Four problem means 0.2 0.4 0.4 0.6: sd 0.1633, t(3) = 3.182446, half width 0.259843."""
    x = np.repeat([[1, 0, 0, 0, 0]], 4, 0)
    x[1:3, 1] = x[3, 1] = x[3, 2] = 1
    s = avg_at_k(x)
    assert s.avg == pytest.approx(0.4)
    assert (s.low, s.high) == pytest.approx((0.4 - 0.259843, 0.4 + 0.259843), abs=1e-5)
    wide = avg_at_k(x, level=0.99)
    assert wide.low < s.low
    assert wide.high > s.high


def test_the_mean_is_over_problems_and_repeats_are_told_apart():
    """One repeat per layer; a swap of axes would show."""
    x = np.zeros((2, 5, 3))
    x[1, :, :2] = 1
    s = avg_at_k(x)
    assert s.each == pytest.approx((0, 2 / 3))
    assert s.avg == pytest.approx(1 / 3)
    # all problems alike: between the exact intervals of 1 and of 2 right ones of 5
    assert (s.low, s.high) == pytest.approx((0.00505, 0.85337), abs=1e-5)
    assert (s.repeats, s.problems, s.samples) == (2, 5, 3)


@pytest.mark.parametrize(("value", "low", "high"), [(0, 0, 0.115703), (1, 0.884297, 1)])
def test_all_wrong_and_all_right_have_a_width(value, low, high):
    """30 problems alike: 1 - 0.025^(1/30)."""
    s = avg_at_k(np.full((30, 4), value))
    assert s.avg == value
    assert (s.low, s.high) == pytest.approx((low, high), abs=1e-6)


def test_one_problem_or_one_sample():
    """One problem says nothing of others, one sample nothing of its own noise."""
    s = avg_at_k([[1, 0]])
    assert (s.avg, s.low, s.high) == (0.5, 0, 1)
    assert np.isnan(avg_at_k([[1], [0]]).noise)


def test_coverage_and_what_independent_samples_would_claim():
    """30 problems of unequal difficulty, 16 samples: about 95 %; samples taken as independent cover 60 %."""
    rng, ours, naive, runs = np.random.default_rng(0), 0, 0, 1000
    for _ in range(runs):
        p = rng.beta(0.5, 1.0, size=(30, 1))  # the mean is 1/3
        x = (rng.random((30, 16)) < p).astype(float)
        s = avg_at_k(x)
        ours += s.low <= 1 / 3 <= s.high
        _, low, high = mean_interval(x.ravel())
        naive += low <= 1 / 3 <= high
    assert 0.93 <= ours / runs <= 0.97
    assert naive / runs < 0.65


def test_noise_is_the_spread_of_repeated_evaluations():
    """The same 30 problems answered again and again."""
    rng = np.random.default_rng(1)
    p = rng.beta(0.5, 1.0, size=(30, 1))
    scores = [avg_at_k(rng.random((2, 30, 8)) < p) for _ in range(800)]
    spread = np.std([s.avg for s in scores], ddof=1)
    assert np.sqrt(np.mean([s.noise**2 for s in scores])) == pytest.approx(spread, rel=0.08)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    """The estimator against every choice of k of 5 samples."""
    x = np.array([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5])
    by_hand = np.mean([[max(c) for c in combinations(row, k)] for row in x.tolist()])
    assert pass_at_k(x, k) == pytest.approx(by_hand)


def test_pass_at_1_is_avg_and_repeats_are_pooled():
    """[2, P, 4] is [P, 8]; the unbiased estimator hits the truth in the mean."""
    rng = np.random.default_rng(2)
    x = (rng.random((2, 40, 4)) < 0.3).astype(float)
    assert pass_at_k(x, 1) == pytest.approx(avg_at_k(x).avg)
    pooled = x.transpose(1, 0, 2).reshape(40, 8)
    assert pass_at_k(x, 5) == pytest.approx(pass_at_k(pooled, 5))
    many = (rng.random((20_000, 6)) < 0.2).astype(float)
    error = stats.norm.ppf(0.9999) * 0.5 / np.sqrt(20_000)
    assert pass_at_k(many, 3) == pytest.approx(1 - 0.8**3, abs=error)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: avg_at_k([1, 0]), r"must be \[problems, samples\]"),
        (lambda: avg_at_k(np.zeros((0, 4))), "must be"),
        (lambda: avg_at_k([[np.nan, 0.0]]), r"in \[0, 1\]"),
        (lambda: avg_at_k([[1.5, 0.0]]), r"in \[0, 1\]"),
        (lambda: pass_at_k([[0.5, 0.0]], 1), "0 and 1"),
        (lambda: pass_at_k([[1, 0]], 3), "1 <= k <= 2"),
        (lambda: pass_at_k([[1, 0]], 0), "1 <= k <= 2"),
    ],
)
def test_what_is_no_score(call, sentence):
    """One sentence each."""
    with pytest.raises(ValueError, match=sentence):
        call()
