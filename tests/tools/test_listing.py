"""`simlab list` names everything that there is, with arguments, and what an experiment costs."""

import json

import pytest

from simlab.simulator.experiments import EXPERIMENTS
from simlab.simulator.noise import NOISES
from simlab.tools.listing import KINDS, cost, run_list


def test_every_name_of_every_kind_is_listed(capsys):
    """Without a kind all but the experiments; every entry says something."""
    run_list(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == KINDS.keys() - {"experiments"}
    assert [x["name"] for x in found["noises"]] == list(NOISES)
    assert all(x["about"] for entries in found.values() for x in entries)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("noises", "dtype=bf16 (str), on=weights (str)"),
        ("lags", "n=required, in_flight=1"),
        ("presets", "advantage dr_grpo, aggregation seq_mean_token_sum_norm"),
        ("tasks", "tree    the automaton"),
    ],
)
def test_arguments_and_defaults_are_shown(capsys, kind, line):
    """As text."""
    run_list([kind])
    assert line in capsys.readouterr().out


def test_the_cost_of_an_experiment_is_its_number_of_runs():
    """E1: fourteen arms at four lags and three draws at lag 0, 24 seeds; a sweep counts every point."""
    assert cost("e1").startswith("1,416 runs, about 2 minutes")
    assert cost("e0").startswith("2,940 runs, about ")
    assert all(" runs, about " in cost(name) for name in EXPERIMENTS)


def test_an_unknown_kind_is_a_sentence():
    """It says which kinds there are."""
    with pytest.raises(ValueError, match=r"noises.*experiments"):
        run_list(["colours"])
