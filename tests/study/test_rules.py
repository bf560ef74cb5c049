"""The rules of verdicts: by hand, against scipy, and their error rates at fixed seeds."""

import itertools

import numpy as np
import pytest
from scipy import stats

from simlab.study import rules


def rng():
    return np.random.default_rng(5)


def test_failures_against_one_draw_are_mcnemars_test():
    """8 seeds of which 7 differ, one of them to the arm's harm."""
    failed = np.array([1, 1, 0, 0, 0, 0, 0, 0], bool)[:, None]
    reference = np.array([1, 0, 1, 1, 1, 1, 1, 1])[:, None]
    p = rules.failure_p(failed, reference, np.ones((8, 1)))
    assert p == pytest.approx(stats.binomtest(1, 7).pvalue)


def test_failures_against_three_draws_by_hand():
    """Two seeds on which 1 and 2 of the 4 runs fail, never the arm: (3/4)(2/4) on one side."""
    p = rules.failure_p(np.zeros((2, 1), bool), np.array([[1], [2]]), np.full((2, 1), 3))
    assert p == pytest.approx(2 * 0.75 * 0.5)
    all_fail = rules.failure_p(np.ones((2, 1), bool), np.array([[3], [0]]), np.full((2, 1), 3))
    assert all_fail == pytest.approx(2 * 0.25)


def test_holm_by_hand():
    """0.01 x 3, then 0.02 x 2, then the largest so far, in the order given."""
    assert rules.holm(np.array([0.03, 0.01, 0.02])) == pytest.approx([0.04, 0.03, 0.04])
    assert rules.holm(np.array([0.5, 0.9])) == pytest.approx([1, 1])


def test_sign_flips_of_one_comparison_are_the_exact_test():
    """All 1024 patterns of ten signs, counted by a loop."""
    d = rng().normal(0.4, 1, (10, 1))
    totals = np.array(list(itertools.product([1, -1], repeat=10))) @ d[:, 0]
    exact = (np.abs(totals) >= abs(d.sum()) - 1e-12).mean()
    assert rules.max_t(d, rng())[3] == pytest.approx(exact)


def test_the_interval_of_one_comparison_is_students():
    """Sign flips of many Gaussian differences give the t interval at the level of one rule."""
    d = rng().normal(0.4, 1, (60, 1))
    mean, low, high, _ = rules.max_t(d, rng())
    half = stats.t.isf(rules.HALF / 2, 59) * stats.sem(d[:, 0])
    assert (mean, high - low) == (pytest.approx(d.mean()), pytest.approx(2 * half, rel=0.05))


def test_interval_and_p_value_agree_over_a_page():
    """An interval excludes 0 where the p-value is at most half of alpha, with seeds missing here and there."""
    d = rng().normal(1, 1, (16, 60))
    d[rng().random(d.shape) < 0.3] = np.nan
    mean, low, high, p = rules.max_t(d, rng())
    excluded = (low > 0) | (high < 0)
    assert 0 < excluded.sum() < 60
    assert (excluded == (p <= rules.HALF)).mean() > 0.98
    assert ((low < mean) & (mean < high)).all()


def test_few_seeds_and_no_spread():
    """Below LEAST seeds nothing is said; equal differences are as clear as their number allows; zeros are none."""
    d = np.full((12, 3), 0.25)
    d[rules.LEAST - 1 :, 1] = np.nan
    d[:, 2] = 0
    mean, low, high, p = rules.max_t(d, rng())
    assert mean.tolist() == [0.25, pytest.approx(np.nan, nan_ok=True), 0]
    assert p[[0, 2]] == pytest.approx([2 / 2**12, 1])
    assert np.isnan(p[1])
    assert (low[0], high[0]) == (0.25, 0.25)


def world(rng, seeds, arms, fail=0.2):
    """Finals of arms and of three draws under the hypothesis: hard and easy seeds, skewed lives, failures."""
    ease = rng.normal(0, 0.02, (seeds, 1))
    finals = 0.9 + ease - 0.03 * rng.exponential(size=(seeds, arms + 3))
    risk = np.clip(fail + rng.normal(0, 0.1, (seeds, 1)), 0, 1)
    finals[rng.random(finals.shape) < risk] = 0.1
    pool = np.repeat(finals[:, None, arms:], arms, axis=1)
    return finals[:, :arms], pool


@pytest.mark.parametrize("seeds", [12, 24])
def test_false_verdicts_are_as_rare_as_promised(seeds):
    """Pages of 12 arms that do what the reference does: at most 5 % have a false verdict, in risk and in level."""
    draw, pages = rng(), 100
    risk = level = 0
    for _ in range(pages):
        answers = rules.answer(*world(draw, seeds, 12), 0.6, draw, 999)
        risk += answers.risk_p.min() <= rules.ALPHA
        level += (answers.side != 0).any()
    for wrong in (risk, level):
        assert stats.binomtest(wrong, pages, rules.ALPHA, alternative="greater").pvalue > 0.01


def test_power_to_see_a_rescue_and_a_shift():
    """An arm that never fails where the reference does in 45 % of its runs, and one that is 0.06 above."""
    draw, seen = rng(), np.zeros(2)
    for _ in range(20):
        arm, pool = world(draw, 24, 20, fail=0.45)
        arm[:, 0] = np.where(arm[:, 0] < 0.6, 0.87, arm[:, 0])
        arm[:, 1] += 0.06 * (arm[:, 1] > 0.6)
        answers = rules.answer(arm, pool, 0.6, draw, 999)
        seen += answers.risk_p[0] <= rules.ALPHA, answers.side[1] == 1
    assert (seen >= 15).all()


def test_the_median_of_an_odd_number_of_draws_is_fair():
    """However skewed finals are, an arm like the reference is above that median half of the time."""
    draw = rng()
    finals = 1 - 0.4 * draw.exponential(size=(40_000, 4)) ** 3
    for draws in (1, 2, 3):
        pool = finals[:, None, 1 : 1 + draws]
        _, median = rules.survivors(finals[:, :1], pool, -np.inf)
        assert (median > 0).mean() == pytest.approx(0.5, abs=0.01)


def test_survivors_by_hand():
    """Failed draws are left out; the first of the others is one reference, a median of an odd number the other."""
    pool = np.array([[[0.8, 0.9, 0.7]], [[0.1, 0.8, 0.7]], [[0.1, 0.1, np.nan]], [[0.9, 0.9, 0.9]]])
    arm = np.array([[0.95], [0.95], [0.95], [0.1]])
    one, median = rules.survivors(arm, pool, 0.5)
    assert one[:, 0] == pytest.approx([0.15, 0.15, np.nan, np.nan], nan_ok=True)
    assert median[:, 0] == pytest.approx([0.15, 0.15, np.nan, np.nan], nan_ok=True)
    pool[0, 0] = [0.7, 0.9, 0.8]
    one, median = rules.survivors(arm, pool, 0.5)
    assert (one[0, 0], median[0, 0]) == (pytest.approx(0.25), pytest.approx(0.15))


def test_the_first_draw_is_fair_as_their_mean_is_not():
    """Rare bad survivors: against the mean of draws most seeds are above it, against one they are not."""
    draw = rng()
    finals = np.where(
        draw.random((40_000, 4)) < 0.05, 0.75, 1 + 1e-3 * draw.normal(size=(40_000, 4))
    )
    one, _ = rules.survivors(finals[:, :1], finals[:, None, 1:], 0.5)
    assert (one > 0).mean() == pytest.approx((one < 0).mean(), abs=0.015)
    mean = finals[:, 0] - finals[:, 1:].mean(1)
    assert (mean > 0).mean() > (mean < 0).mean() + 0.05


def test_two_rules_that_contradict_each_other_are_no_verdict():
    """Nearly all seeds a little above, two far below: the median is above, the mean is not below."""
    pool = np.full((40, 1, 3), 0.8) + 1e-3 * rng().normal(size=(40, 1, 3))
    arm = pool[:, :, 0] + 0.01
    assert rules.answer(arm, pool, 0.5, rng()).side == 1
    assert rules.answer(2 * 0.8 - arm, pool, 0.5, rng()).side == -1
    arm[:2] -= 0.2
    answers = rules.answer(arm, pool, 0.5, rng())
    assert (answers.side, answers.typical_low > 0, answers.gain_p > rules.HALF) == (1, True, True)


def test_what_a_page_could_have_seen():
    """The numbers that pages print are numbers at which the rules do see, four times in five or so."""
    draw = rng()
    failures = rules.fewest_failures(24, 3, 52, draw)
    assert 7 <= failures <= 11
    assert rules.fewest_failures(24, 1, 52, draw) > failures
    assert rules.fewest_failures(8, 1, 52, draw) is None
    noise = draw.normal(0, 1, (80, 24, 52))
    shift = rules.smallest_shift(noise[0], 52)
    hits = sum(
        rules.max_t(x + shift * (np.arange(52) == 0), draw, 999)[3][0] <= rules.HALF for x in noise
    )
    assert 0.68 <= hits / 80 <= 0.92
