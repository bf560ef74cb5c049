"""Declared ages are measured, on the regimes and in a training run."""

import pytest

from simlab.lag import LAGS, Interval, Sync
from simlab.specs import regime

RULES = [Sync(), *(Interval(n, ahead) for n in (1, 2, 7, 24) for ahead in (0, 1, 3))]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_largest_age_is_reached_and_never_passed(rules):
    """Ages over a long run have exactly the declared maximum, and a version in use was broadcast."""
    sent, ages = set(), []
    for step in range(10 * (rules.largest_age + 1)):
        if rules.broadcast_now(step):
            sent.add(step)
        assert rules.version(step) in sent
        ages.append(step - rules.version(step))
    assert max(ages) == rules.largest_age
    assert min(ages) == 0


def test_specs_name_regimes():
    """Numbers are intervals with one window in flight, 0 is synchronous, names take arguments."""
    assert regime("0") == Sync()
    assert regime("8") == Interval(8, in_flight=1)
    assert regime("interval:n=8,in_flight=0") == Interval(8, in_flight=0)
    for spec, says in {
        "fast": "no lag regime",
        "interval:m=3": "interval:m=3",
        "interval:n=2.5": "whole n",
    }.items():
        with pytest.raises(ValueError, match=says):
            regime(spec)


def test_worked_example():
    """The table in the docstring of Interval, and age 8 to 15 for lag 8 with a window in flight."""
    two = Interval(2, in_flight=1)
    assert [two.version(k) for k in range(6)] == [0, 0, 0, 0, 2, 2]
    eight = Interval(8, in_flight=1)
    assert {k - eight.version(k) for k in range(16, 200)} == set(range(8, 16))


@pytest.mark.parametrize(("n", "in_flight"), [(0, 1), (-1, 0), (3, -1)])
def test_impossible_intervals(n, in_flight):
    """One sentence for n < 1 or a negative number of windows."""
    with pytest.raises(ValueError, match="interval lag needs"):
        Interval(n, in_flight)


def test_registry_members_share_the_interface():
    """Every regime has the three members that train.py and a cluster ask."""
    assert {type(rules) for rules in RULES} == set(LAGS.values())
    for rules in RULES:
        assert {"broadcast_now", "version", "largest_age"} <= set(dir(rules))
