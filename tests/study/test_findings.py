"""What is said of runs in which nothing happened: not trained, never acted, seeds that are one run."""

import numpy as np
import polars as pl
import pytest
import torch
from simulator.test_compare import TINY
from simulator.test_summary import SEEDS, config, curves, judged, noisy, rows

import simlab.simulator.compare
from simlab.__main__ import main
from simlab.core.advantages import flat_groups
from simlab.simulator.summary import findings
from simlab.study.findings import of_run


def text(chosen, data):
    return "\n".join(findings(chosen, judged(chosen, data)))


def at(data, arm, **numbers):
    """These numbers in every row of an arm."""
    own = pl.col("arm") == arm
    changes = [pl.when(own).then(x).otherwise(pl.col(n)).alias(n) for n, x in numbers.items()]
    return data.with_columns(changes)


def test_what_was_not_trained_is_said_with_its_reason():
    """All masked, one reward in every group, a learning rate of 0, a gradient of 0 for another reason."""
    chosen, data = config("ppo", "sat"), rows(curves(ppo=noisy(0.6), sat=noisy(0.7)))
    assert "trained" not in text(chosen, data)
    masked = {"tokens": 0, "grad_norm": 0.0, "ess": 0.0}
    for numbers, why in (
        (masked, "all masked: no data"),
        (
            {"grad_norm": 0.0, "flat_groups": 1.0},
            "in every logged batch all answers to a prompt got one reward",
        ),
        ({"grad_norm": 0.0}, "the gradient was 0 at every logged step"),
    ):
        one, both = at(data, "sat", **numbers), at(at(data, "sat", **numbers), "ppo", **numbers)
        assert f"Nothing was trained in sat at lag 1: {why}" in text(chosen, one)
        assert f"Nothing was trained: {why}" in text(chosen, both)
        assert "never acted" not in text(chosen, both)
        assert of_run(one.filter(arm="sat"), 1.0).startswith(f"Nothing was trained: {why}")
    still = config("ppo", "sat", training={"lr": 0.0})
    assert "Nothing was trained: the learning rate is 0" in text(still, data)
    assert not of_run(data, 1.0)
    assert not of_run(at(data, "ppo", grad_norm=float("nan")), 1.0)
    part = data.with_columns(
        pl.when(pl.col("step") > 0).then(0.0).otherwise(0.5).alias("grad_norm")
    )
    assert "trained" not in text(chosen, part)


def test_a_rule_that_weights_has_acted_though_it_cuts_as_ppo_does():
    """`unlike_ppo` = 0 is no sign of rest: the runs differ, or at least their gradients."""
    chosen = config("ppo", "tis")
    data = rows(curves(ppo=noisy(0.6), tis=noisy(0.6))).with_columns(
        pl.lit(0.0).alias("unlike_ppo")
    )
    assert "never acted: tis at lag 1" in text(chosen, data)
    assert "never acted" not in text(chosen, at(data, "tis", grad_norm=0.6))


def test_seeds_that_are_one_run_are_said():
    """Twelve equal rows are one; intervals and verdicts of them mean nothing."""
    chosen = config("ppo", "sat")
    data = rows(curves(ppo=noisy(0.6), sat=np.full(SEEDS, 0.7)))
    assert "All seeds are one run in sat at lag 1: nothing in it depends on the seed" in text(
        chosen, data
    )
    assert "All seeds are one run" not in text(chosen, rows(curves(ppo=noisy(0.6), sat=noisy(0.7))))


def test_c042_groups_of_two_answers_are_mostly_flat():
    """A success rate of 0.1819: 70, 45, 20 and 4 % of groups of 2, 4, 8 and 16 teach nothing; the first is said."""
    p, shares = 0.1819, {}
    for n in (2, 4, 8, 16):
        every = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * n)
        chance = (p**every * (1 - p) ** (1 - every)).double().prod(-1)
        shares[n] = float(chance[flat_groups(every)].sum())
    assert shares == pytest.approx({2: 0.7024, 4: 0.4490, 8: 0.2007, 16: 0.0403}, abs=5e-5)
    chosen, data = config("ppo", "sat"), rows(curves(ppo=noisy(0.2), sat=noisy(0.2)))
    said = text(chosen, at(data, "ppo", flat_groups=shares[2]))
    assert "Most groups of ppo taught nothing" in said
    assert "70 % at lag 1" in said
    assert "Most groups" not in text(chosen, at(data, "ppo", flat_groups=shares[4]))
    learned = rows(curves(ppo=noisy(0.9), sat=noisy(0.9)))
    assert "Most groups" not in text(chosen, at(learned, "ppo", flat_groups=0.9))


@pytest.mark.parametrize(
    ("words", "says", "never"),
    [
        (["--answers", "1"], "a group of one answer always does", "never acted"),
        (["--lr", "0"], "Nothing was trained: the learning rate is 0", "All seeds are one run"),
        (
            ["--proximal", "step", "--methods", "ppo", "decoupled", "tis", "--lags", "8"],
            'tis: its clip cannot act, because proximal = "step"',
            "Nothing was trained",
        ),
    ],
    ids=["D059", "null", "D073"],
)
def test_d059_d073_the_command_says_it(words, says, never, tmp_path, monkeypatch, capsys):
    """Groups of one answer, a learning rate of 0, a ratio that is 1 by construction."""
    monkeypatch.setattr(simlab.simulator.compare, "write_report", lambda *_: None)
    arms = ["--methods", "ppo", "sat", "--noise", "gaussian:scale=1", "--workers", "1"]
    main(["compare", *TINY, *arms, "--out", str(tmp_path / "x"), *words])
    said = capsys.readouterr().out
    assert says in said
    assert never not in said
