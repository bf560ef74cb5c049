"""What annotations allow: intervals, words, unions; one sentence for everything else."""

from __future__ import annotations

import math
from inspect import Parameter, signature
from typing import Annotated, Literal

import pytest
import torch

from simlab.core.arguments import Interval, check_arguments, describe, required, settable
from simlab.stabilizers import NAMES, bind, load, parts


def rule(
    b: object,
    *,
    alpha: Annotated[float, Interval("(0, 1]")] = 0.9,
    cap: Annotated[float, Interval("(1, inf]")] | None = None,
    size: Annotated[int, Interval("[1, inf)")],
    level: Literal["token", "sequence"] = "token",
    plain: float | None = None,
    flag: bool = False,
    limit: torch.Tensor | float = 0.0,
    typo: Unknown = 1.0,  # noqa: F821
):
    """A made-up method."""


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("(0, 1]", (1e-9, 1), (0, -1, 1.1)),
        ("[0, 1)", (0, 0.99), (1, -1e-9)),
        ("[0, inf)", (0, 1e30), (math.inf, -1)),
        ("(0, inf]", (1e-30, math.inf), (0,)),
    ],
)
def test_an_interval_is_read_as_written(text, inside, outside):
    """Round ends are out, square ends are in, NaN is nowhere."""
    assert all(x in Interval(text) for x in inside)
    assert not any(x in Interval(text) for x in (*outside, math.nan))


def test_what_is_settable_and_what_it_may_be():
    """Tensors and annotations that mean nothing here are the caller's; the others have words."""
    assert {name: describe(kinds) for name, kinds in settable(rule).items()} == {
        "alpha": "in (0, 1]",
        "cap": "in (1, inf] or None",
        "size": "int in [1, inf)",
        "level": "token or sequence",
        "plain": "float or None",
        "flag": "bool",
    }
    assert required(rule) == {"size"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"alpha": 2}, "sat: alpha must lie in (0, 1], got 2"),
        ({"alpha": math.nan}, "sat: alpha must lie in (0, 1], got nan"),
        ({"alpha": "most"}, "sat: alpha must lie in (0, 1], got 'most'"),
        ({"alpha": True}, "sat: alpha must lie in (0, 1], got True"),
        ({"cap": 1}, "sat: cap must lie in (1, inf] or be None, got 1"),
        ({"cap": 1e39}, "sat: cap must be a number that float32 holds, 0 or 1.2e-38 to 3.4e+38 in size, got 1e+39"),
        ({"alpha": 1e-39}, "sat: alpha must be a number that float32 holds, 0 or 1.2e-38 to 3.4e+38 in size, got 1e-39"),
        ({"size": 2.0}, "sat: size must be int in [1, inf), got 2.0"),
        ({"size": 0}, "sat: size must be int in [1, inf), got 0"),
        ({"level": "turn"}, "sat: level must be token or sequence, got 'turn'"),
        ({"level": 1}, "sat: level must be token or sequence, got 1"),
        ({"plain": "wide"}, "sat: plain must be float or be None, got 'wide'"),
        ({"flag": 1}, "sat: flag must be bool, got 1"),
        ({"limit": 0.1}, "sat has no argument limit; it takes alpha, cap, flag, level, plain, size"),
        ({"typo": 0.1}, "sat has no argument typo; it takes alpha, cap, flag, level, plain, size"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(given, says):
    """Method, argument, what is allowed, what was got."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_arguments("sat", settable(rule), given)
    assert str(error.value) == says


@pytest.mark.parametrize(
    "given",
    [
        {"alpha": 1},
        {"alpha": 0.5},
        {"cap": math.inf},
        {"cap": None},
        {"size": 1},
        {"level": "sequence"},
        {"plain": 3},
        {"flag": True},
    ],
)
def test_what_fits_passes(given):
    """Whole numbers are numbers; an end that is in may be given."""
    check_arguments("sat", settable(rule), given)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_fit_their_own_annotations(name):
    """For every registered method, and one argument of both functions may be the same in both."""
    seen = {}
    for function in parts(name).values():
        known = settable(function)
        given = {key: signature(function).parameters[key].default for key in known}
        check_arguments(name, known, {k: v for k, v in given.items() if v is not Parameter.empty})
        for key, kinds in known.items():
            assert seen.setdefault(key, kinds) == kinds


def test_a_number_that_float32_cannot_hold_names_its_argument():
    """A cap of 1e39 would be infinite, or an error far from here."""
    for name, given in (("tis", {"cap": 1e39}), ("kpop", {"phi": 1e39}), ("mis", {"high": 1e39})):
        with pytest.raises(ValueError, match=f"{name}: {next(iter(given))} must be a number that"):
            bind(name, **given)


def test_a_default_of_a_users_file_is_checked(tmp_path):
    """`load` names file, argument and range."""
    path = tmp_path / "wide.py"
    path.write_text(
        "from typing import Annotated\n"
        "from simlab.core.arguments import Interval\n"
        "def surrogate(b, *, cap: Annotated[float, Interval('(0, 1]')] = 2.0): ...\n"
    )
    with pytest.raises(ValueError, match=r"wide\.py: wide: cap must lie in \(0, 1\], got 2\.0"):
        load(path)
