"""The rollout pool on engines that are made up: routing, deaths, silence. No Ray, no SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from scaleup.rollout import pool as engines
from scaleup.rollout.pool import Pool, Request
from scaleup.world import EngineSpec
from simlab.study.settings import RunError


class Fake:
    """Ray and its engines in one process. Engine i answers at each `collect` one of its requests."""

    exceptions = ray.exceptions

    def __init__(self):
        self.dead, self.given, self.began, self.calls, self.started = set(), {}, {}, [], 0
        self.clock = SimpleNamespace(now=100.0, monotonic=lambda: self.clock.now)

    def actor(self, number):
        """An engine with the calls that the pool makes."""
        self.started += 1
        me = self.started
        self.given[me] = []

        def begin(requests):
            self.given[me] += requests
            self.began.setdefault(me, []).extend(requests)

        def collect(seconds):
            done = [(r, [f"{r.key} of {me}"]) for r in self.given[me][:1]]
            del self.given[me][:1]
            return done, len(self.given[me])

        def method(name, body):
            def remote(*arguments):
                self.calls.append((me, name, arguments))
                return lambda: self.call(me, body, arguments)

            return SimpleNamespace(remote=remote)

        bodies = {"begin": begin, "collect": collect}
        names = ("begin", "collect", "push", "clear", "pid")
        return SimpleNamespace(
            **{n: method(n, bodies.get(n, lambda *_: None)) for n in names}, me=me
        )

    def call(self, me, body, arguments):
        """A call that has arrived."""
        if me in self.dead:
            raise ray.exceptions.ActorDiedError
        return body(*arguments)

    def get(self, ref, timeout):
        """The result of one reference."""
        return ref()

    def wait(self, refs, num_returns=1, timeout=0):
        """All are ready, and time has gone."""
        self.clock.now += timeout
        return refs[:num_returns], refs[num_returns:]

    def kill(self, actor):
        """Nothing comes back from it."""
        self.dead.add(actor.me)


@pytest.fixture
def fake(monkeypatch):
    """A pool's Ray."""
    found = Fake()
    monkeypatch.setattr(engines, "ray", found)
    monkeypatch.setattr(engines, "time", found.clock)
    monkeypatch.setattr(Pool, "_start", lambda pool, m: setattr(m, "actor", found.actor(m.number)))
    return found


def requests(batch, n, answers=4):
    """Requests of a batch."""
    return [Request(batch, i, [1], answers, None, {}) for i in range(n)]


def test_requests_go_where_the_load_is_least(fake):
    """By answers in flight, not by requests, over what is there from before."""
    pool = Pool("", EngineSpec(count=3), dict)
    pool.clear()
    pool.begin(requests(0, 1, answers=8))
    pool.begin(requests(1, 4, answers=3))
    assert [[r.key for r in fake.given[i]] for i in (1, 2, 3)] == [
        [(0, 0)],
        [(1, 0), (1, 2)],
        [(1, 1), (1, 3)],
    ]
    assert pool.in_flight == 5
    keys = []
    while pool.in_flight:
        keys += [r.key for r, _ in pool.collect(0)]
    assert sorted(keys) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_new_engine_gets_weights_and_requests(fake):
    """All that was begun together is begun again, what was accepted is not accepted twice."""
    pool = Pool("", EngineSpec(restarts=1), dict)
    pool.clear()
    pool.push("weights", 3)
    pool.begin(requests(0, 3))
    first = pool.collect(0)
    fake.dead.add(1)
    rest = []
    while pool.in_flight:
        rest += pool.collect(0)
    assert [r.key for r, _ in first] == [(0, 0)]
    assert [samples for _, samples in rest] == [["(0, 1) of 2"], ["(0, 2) of 2"]]
    names = [(name, arguments) for me, name, arguments in fake.calls if me == 2]
    assert names[:3] == [("pid", ()), ("push", ("weights", 3)), ("begin", (requests(0, 3),))]
    pool.begin(requests(1, 1))
    fake.dead.add(2)
    with pytest.raises(RunError, match="engine 0 died, and 1 restarts are used up"):
        pool.collect(0)
    pool.clear()  # the next run starts it
    assert fake.started == 3
    assert pool.in_flight == 0


def test_what_a_busy_engine_lost_is_begun_again_alone(fake):
    """With new requests among old ones, only what is missing starts again."""
    pool = Pool("", EngineSpec(), dict)
    pool.clear()
    pool.begin(requests(0, 2))
    pool.collect(0)
    pool.begin(requests(1, 1))
    fake.dead.add(1)
    pool.collect(0)
    assert [r.key for r in fake.given[2]] == [(0, 1), (1, 0)]


def test_a_death_while_the_last_one_is_made_good(fake):
    """New requests come while accepted ones are sampled again: those stay accepted, through a second
    death too, and nothing is lost."""
    pool = Pool("", EngineSpec(restarts=2), dict)
    pool.clear()
    pool.begin(requests(0, 3))
    accepted = pool.collect(0)
    fake.dead.add(1)
    pool.collect(0)  # engine 2 begins all three again
    pool.begin(requests(1, 2))
    accepted += pool.collect(0)  # (0, 0), for the second time
    fake.dead.add(2)
    while pool.in_flight:
        accepted += pool.collect(0)
    keys = [r.key for r, _ in accepted]
    assert sorted(keys) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [r.key for r in fake.began[3]] == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_an_engine_that_comes_back_to_nothing_is_idle(fake):
    """It dies over requests that were accepted before: there is nothing to begin, and no time runs."""
    pool = Pool("", EngineSpec(restarts=2), dict)
    pool.clear()
    pool.begin(requests(0, 2))
    pool.collect(0)
    fake.dead.add(1)
    pool.collect(0)  # engine 2 begins both again, one of them was accepted
    done = []
    while len(done) < 1:
        done += pool.collect(0)
    member = pool.members[0]
    if member.running:  # the accepted one is still out
        fake.dead.add(2)
        pool.collect(0)
    assert not member.running
    before = pool.busy()
    fake.clock.now += 50
    assert pool.busy() == before


def test_an_engine_without_answers_is_given_up(fake):
    """C084: alive, but no answer of it ends within the timeout of waiting for it."""
    pool = Pool("", EngineSpec(timeout=5, restarts=0), dict)
    pool.clear()
    pool.begin(requests(0, 1))
    fake.given[1].clear()
    fake.clock.now += 100  # nobody waits: a checkpoint, say
    assert pool.collect(3) == []
    with pytest.raises(RunError, match="engine 0 finished no response in 5 s"):
        pool.collect(3)


def test_a_slow_restart_is_not_the_silence_of_the_others(fake, monkeypatch):
    """One engine dies and takes long to come back; the other one is left alone."""
    pool = Pool("", EngineSpec(count=2, timeout=5, restarts=1), dict)
    pool.clear()
    pool.begin(requests(0, 4))
    start = Pool._start
    monkeypatch.setattr(
        Pool, "_start", lambda *a: (setattr(fake.clock, "now", fake.clock.now + 60), start(*a))
    )
    fake.dead.add(1)
    keys = []
    while pool.in_flight:
        keys += [r.key for r, _ in pool.collect(0)]
    assert sorted(keys) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert pool.restarts == 1
    assert 2 not in fake.dead
