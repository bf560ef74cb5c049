"""Every promise can be broken, and each way of breaking one is refused with its cure."""

import pytest
from broken import BROKEN, RIGHT

from simlab.contract.promises import APART, PROMISES, BrokenPromise, check
from simlab.stabilizers import bind, load

ALL = PROMISES | APART
# told by more than one promise, whichever comes first
TWICE = {
    "half", "narrow", "guessed", "mixing", "multiplied", "first", "unheld", "certain", "mean_of_means",
    "remembers", "fifth_call", "own_draws", "writes", "tidies", "nothing", "in_place", "head_held", "head_unseen",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_ones_pass(own, name):
    """What the broken ones are made from keeps every promise, `fuse` among them."""
    check(bind(load(own(name, RIGHT[name]))), PROMISES | {"one_graph": APART["one_graph"]})


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_named(own, name):
    """One line: the promise, what is wrong, and what to do."""
    promise, says, text = BROKEN[name]
    known = PROMISES if promise in PROMISES else {promise: APART[promise]}
    with pytest.raises(BrokenPromise, match=f"{name} breaks the promise {promise}") as error:
        check(bind(load(own(name, text))), known)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - TWICE))
def test_no_other_promise_would_have_noticed(own, name):
    """Without its promise the broken method passes."""
    promise, _, text = BROKEN[name]
    check(bind(load(own(name, text))), {k: f for k, f in PROMISES.items() if k != promise})


def test_every_promise_has_somebody_who_breaks_it():
    """No promise that cannot fail."""
    assert {promise for promise, _, _ in BROKEN.values()} == set(ALL)
