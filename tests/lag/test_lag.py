"""Declared ages are measured: on the regimes, with a clock, and in test_train.py in training runs."""

import inspect
from dataclasses import dataclass

import numpy as np
import pytest

from simlab.lag import LAGS, FullyAsync, Interval, Regime, Sync
from simlab.study.specs import regime


@dataclass(frozen=True)
class Behind:
    """A regime of one's own, which inherits nothing: weights every step, always `age` steps old."""

    age: int
    on_broadcast = "drain"

    @property
    def largest_age(self):
        return self.age

    def broadcast_now(self, step):
        return True

    def may_start(self, batch, served):
        return served == self.version(batch)

    def version(self, step):
        return max(step - self.age, 0)

    def versions(self, step, horizon):
        return [self.version(step)] * horizon


RULES = [
    Sync(),
    Behind(0),
    Behind(3),
    *(Interval(n, ahead) for n in (1, 2, 7, 24) for ahead in (0, 1, 3)),
    *(FullyAsync(age, updates) for age, updates in [(0, 0), (1, 1), (4, 0), (4, 2), (7, 7)]),
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_largest_age_is_reached_and_never_passed(rules):
    """Ages over a long run have exactly the declared maximum, and a version in use was broadcast."""
    sent, ages = set(), []
    for step in range(10 * (rules.largest_age + 1)):
        if rules.broadcast_now(step):
            sent.add(step)
        assert set(rules.versions(step, 10)) <= sent
        assert min(rules.versions(step, 10)) == rules.version(step)
        ages += [step - v for v in rules.versions(step, 10)]
    assert max(ages) == rules.largest_age
    assert min(ages) == 0


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("horizon", [1, 3, 10])
def test_an_answer_has_one_version_unless_it_goes_on(rules, horizon):
    """A version for each position, never an older one after a newer one; drained answers have one."""
    assert rules.on_broadcast in ("drain", "retract")
    for step in range(30):
        versions = rules.versions(step, horizon)
        assert len(versions) == horizon
        assert versions == sorted(versions)
        assert versions[0] == rules.version(step)
        assert rules.on_broadcast == "retract" or len(set(versions)) == 1


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_oldest_version_that_may_start_a_batch_is_its_version(rules):
    """On a cluster no batch starts under older weights than the simulator gives it."""
    sent = [k for k in range(60) if rules.broadcast_now(k)]
    for batch in range(60):
        allowed = [v for v in sent if v <= batch and rules.may_start(batch, v)]
        assert min(allowed) == rules.version(batch)
        assert rules.on_broadcast == "retract" or allowed == [rules.version(batch)]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("speed", [1, 5])
def test_the_clock_keeps_the_age(rules, speed):
    """An engine of random speed under these rules: nothing waits for ever, no token is too old."""
    rng, horizon, steps = np.random.default_rng(0), 6, 4 * (rules.largest_age + 2)
    flying, served, step, ages, mixed = [], 0, 0, [], 0
    for _ in range(100_000):
        while rules.may_start(step + len(flying), served):
            flying.append([])
        for answer in flying:
            more = min(rng.integers(speed + 1), horizon - len(answer))
            answer += [served] * more
        busy = any(len(answer) < horizon for answer in flying)
        if rules.broadcast_now(step) and served != step:
            if rules.on_broadcast == "retract" or not busy:
                served = step
        elif flying and len(flying[0]) == horizon:
            answer = flying.pop(0)
            ages += [step - v for v in answer]
            mixed += len(set(answer)) > 1
            step += 1
            if step == steps:
                break
    assert step == steps
    assert max(ages) <= rules.largest_age
    if rules.on_broadcast == "drain":
        assert max(ages) == rules.largest_age
        assert mixed == 0
    elif rules.largest_age:
        assert mixed > 0


def test_c076_a_batch_may_start_within_its_age_exactly():
    """N = 2 at step 7: weights 5 to 7 may start it, 3 and 4 may not; the age is counted from their version."""
    assert [v for v in (3, 4, 5, 7) if FullyAsync(2).may_start(7, v)] == [5, 7]
    assert [7 - v for v in (3, 4, 5, 7)] == [4, 3, 2, 0]
    assert FullyAsync(2).version(7) == 5


def test_c080_c082_slow_prompts_are_waited_for_and_none_expires():
    """Durations 1 and 5, age at most 3, 100 steps: batches train in the order of their start, so both kinds
    are trained as often as they were sampled, no token is older than 3, and none has to be masked or dropped."""
    rules, flying, kinds, ages, step, served = FullyAsync(3), [], [], [], 0, 0
    while step < 100:
        while rules.may_start(step + len(flying), served):
            batch = step + len(flying)
            flying.append([batch % 2, (1, 5)[batch % 2], []])
        for answer in flying:
            if answer[1]:
                answer[1] -= 1
                answer[2].append(served)
        if not flying[0][1]:
            kind, _, versions = flying.pop(0)
            kinds.append(kind)
            ages += [step - v for v in versions]
            step += 1
            served = step
    assert kinds.count(0) == kinds.count(1) == 50
    assert max(ages) == 3


def test_specs_name_regimes():
    """Numbers are intervals with one window in flight, 0 is synchronous, names take arguments."""
    assert regime("0") == Sync()
    assert regime("8") == Interval(8, in_flight=1)
    assert regime("interval:n=8,in_flight=0") == Interval(8, in_flight=0)
    assert regime("fully_async:max_age=8") == FullyAsync(8, updates=1)
    assert regime("fully_async:max_age=0") == FullyAsync(0, updates=0)
    for spec, says in {
        "fast": "no lag regime",
        "interval:m=3": "interval:m=3",
        "interval:n=2.5": "whole n",
        "fully_async": "missing a required argument: 'max_age'",
        "interval:n=true": "whole n",
        "fully_async:max_age=true": "whole max_age",
        "fully_async:max_age=1.5": "whole max_age",
        "fully_async:max_age=2,updates=3": "updates from 0 to max_age, got 3",
    }.items():
        with pytest.raises(ValueError, match=says):
            regime(spec)


def test_worked_examples():
    """The tables in the docstrings, and age 8 to 15 for lag 8 with a window in flight."""
    two = Interval(2, in_flight=1)
    assert [two.version(k) for k in range(6)] == [0, 0, 0, 0, 2, 2]
    eight = Interval(8, in_flight=1)
    assert {k - eight.version(k) for k in range(16, 200)} == set(range(8, 16))
    rules = FullyAsync(2)
    versions = [rules.versions(k, 4) for k in range(4)]
    assert versions == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 2, 2]]


@pytest.mark.parametrize(("max_age", "updates"), [(3, 0), (3, 1), (3, 2), (3, 3), (9, 4)])
def test_pushes_cut_an_answer_into_equal_spans(max_age, updates):
    """Against a count: push j of u lies at j / (u + 1) of the answer, and none is from the future."""
    rules = FullyAsync(max_age, updates)
    for step in range(15):
        for horizon in (1, 5, 12):
            first = step - max_age if step > max_age else 0
            for t, version in enumerate(rules.versions(step, horizon)):
                pushed = sum(j * horizon <= t * (updates + 1) for j in range(1, updates + 1))
                assert version == (first + pushed if first + pushed < step else step)


@pytest.mark.parametrize(("n", "in_flight"), [(0, 1), (-1, 0), (3, -1)])
def test_impossible_intervals(n, in_flight):
    """One sentence for n < 1 or a negative number of windows."""
    with pytest.raises(ValueError, match="interval lag needs"):
        Interval(n, in_flight)


@pytest.mark.parametrize(("max_age", "updates"), [(-1, None), (2, 3), (2, -1), (0, 1), (2, 0.5)])
def test_impossible_queues(max_age, updates):
    """One sentence for a negative age, and for more pushes than the age allows."""
    with pytest.raises(ValueError, match="fully_async lag needs"):
        FullyAsync(max_age, updates)


def test_every_regime_is_tested_here():
    """A new regime joins RULES."""
    assert {type(rules) for rules in RULES} == {*LAGS.values(), Behind}


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_every_regime_satisfies_the_protocol(rules):
    """All members, and methods with the protocol's parameters; without one of them it is no regime."""
    assert isinstance(rules, Regime)
    for name, member in inspect.getmembers(Regime, inspect.isfunction):
        if not name.startswith("_"):
            wanted = list(inspect.signature(member).parameters)[1:]
            assert list(inspect.signature(getattr(rules, name)).parameters) == wanted, name


@pytest.mark.parametrize("lacking", [x for x in dir(Regime) if not x.startswith("_")])
def test_a_regime_that_lacks_a_member_is_none(lacking):
    """Each member of the protocol counts."""
    members = {x: getattr(Sync, x) for x in dir(Regime) if not x.startswith("_")}
    assert isinstance(type("Whole", (), dict(members))(), Regime)
    del members[lacking]
    assert not isinstance(type("Part", (), members)(), Regime)
