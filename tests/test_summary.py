"""What may be said: final, collapse, placebo spread and verdicts on rows made by hand."""

import numpy as np
import polars as pl
import pytest

from simlab.config import Config
from simlab.report import findings
from simlab.summary import MEANS, runs, summarize

SEEDS = 12
STEPS = list(range(0, 80, 10))  # 8 logged steps: the last eighth is the last one


def rows(curves):
    """Rows of {(arm, lag, seed): curve of J}; every other number is a constant."""
    out = []
    for (arm, lag, seed), curve in curves.items():
        for step, J in zip(STEPS, curve, strict=True):
            row = dict.fromkeys(MEANS, 0.1) | {"arm": arm, "lag": lag, "seed": seed, "step": step}
            row |= {"J": J, "d_max": 1.0, "skipped_steps": 0, "remainder": 0.1}
            out.append(row | {"penalty_mean": 0.5 if step < 40 else 2.0, "penalty_max": 3.0})
    return pl.DataFrame(out)


def ramp(final, peak=None):
    return [0.3, 0.4, 0.5, 0.6, peak or 0.7, 0.7, 0.7, final]


def config(*methods):
    return Config(methods=methods, lags=("1",), seeds=SEEDS, noise=())


def curves(**finals):
    return {
        (arm, "1", seed): ramp(J) for arm, seeds in finals.items() for seed, J in enumerate(seeds)
    }


def test_final_peak_collapse_and_vacuous():
    """Final is the last eighth, collapse is below .7 of the run's own peak, J = NaN counts as 0."""
    data = curves(ppo=[0.9, 0.49, 0.48, float("nan"), 0.9, 0.9])
    table = runs(rows(data)).sort("seed")
    assert table["final"].to_list() == [0.9, 0.49, 0.48, 0.0, 0.9, 0.9]
    assert table["peak"].to_list() == [0.9, 0.7, 0.7, 0.7, 0.9, 0.9]
    assert table["collapsed"].to_list() == [False, False, True, True, False, False]
    assert table["diverged"].to_list() == [False, False, False, True, False, False]
    assert table["vacuous_mean"][0] == 0.5
    assert table["vacuous_max"][0] == 1.0


def noisy(mean, scale=0.01, seed=0):
    return mean + scale * np.random.default_rng(seed).standard_normal(SEEDS)


def test_verdict_needs_the_exact_interval_outside_the_placebo_spread():
    """The same gap is a finding next to a small placebo spread and none next to a large one."""
    methods = ("ppo", "sat", "placebo-eps=ppo:eps_low=0.2001")
    for offset, verdict in ((0.002, "above"), (0.25, "not separated")):
        finals = {"placebo-eps": noisy(0.6 + offset, 0.001)}
        data = curves(ppo=[0.6] * SEEDS, sat=noisy(0.8), **finals)
        table = summarize(config(*methods), rows(data))
        sat = table.row(by_predicate=pl.col("arm") == "sat", named=True)
        assert sat["verdict"] == verdict
        assert sat["placebo_spread"] == pytest.approx(offset, abs=0.002)


def test_a_verdict_is_about_the_typical_seed_and_needs_enough_of_them():
    """One collapse turns the mean, not the median; three seeds allow no verdict at all."""
    finals = noisy(0.8)
    finals[3] = 0.0
    data = rows(curves(ppo=[0.6] * SEEDS, sat=finals))
    row = summarize(config("ppo", "sat"), data).row(by_predicate=pl.col("arm") == "sat", named=True)
    assert row["verdict"] == "above"
    assert row["typical"] > row["diff"] + 0.05
    assert row["collapsed"] == 1
    few = Config(methods=("ppo", "sat"), lags=("1",), seeds=3, noise=())
    table = summarize(few, data.filter(pl.col("seed") < 3))
    assert table["verdict"].to_list() == ["reference", "not separated"]
    assert "3 seeds are too few for any verdict" in " ".join(findings(few, table))


def test_a_placebo_runs_the_method_of_the_reference():
    """With another reference the placebo arms of ppo are ordinary arms."""
    methods = ("ppo", "sat", "placebo-draws=ppo@1")
    assert config(*methods).placebos == ["placebo-draws"]
    assert Config(methods=methods, reference="sat").placebos == []


def test_overlapping_arms_are_never_ranked():
    """Case C088: three seeds each, a gap inside the spread; no winner is named."""
    chosen = Config(methods=("ppo", "sat"), lags=("1",), seeds=3, noise=())
    data = curves(ppo=[0.30, 0.35, 0.39], sat=[0.33, 0.48, 0.40])
    table = summarize(chosen, rows(data))
    text = " ".join(findings(chosen, table))
    assert "not separated from ppo, and not ranked: sat" in text
    assert "above ppo" not in text
    assert "below ppo" not in text
    assert "There is no placebo arm" in text


def test_a_reference_among_its_placebos_has_no_findings():
    """Nothing is said of methods where there are none."""
    methods = ("ppo", "placebo-draws=ppo@1")
    data = curves(ppo=[0.6] * SEEDS, **{"placebo-draws": [0.7] * SEEDS})
    said = findings(config(*methods), summarize(config(*methods), rows(data)))
    assert said[0] == "Lag 1: The placebo spread is 0.1000."


def test_identical_arms_are_named():
    """Arms with the very same runs are named; arms that end alike but were cut differently are not."""
    data = rows(curves(ppo=noisy(0.6), sat=noisy(0.6)))
    chosen = config("ppo", "sat")
    said = "sat gave the very runs of ppo"
    assert said in " ".join(findings(chosen, summarize(chosen, data)))
    other = data.with_columns(pl.when(pl.col("arm") == "sat").then(0.2).otherwise(0.1).alias("cut"))
    assert said not in " ".join(findings(chosen, summarize(chosen, other)))


def test_a_violated_bound_is_counted():
    """Remainder above both penalties, on every logged step of one run."""
    data = rows(curves(ppo=[0.5] * SEEDS)).with_columns(
        pl.when(pl.col("seed") == 2).then(9.0).otherwise(0.1).alias("remainder")
    )
    assert summarize(config("ppo"), data)["bound_violations"][0] == 8


def test_a_diverged_run_violates_nothing():
    """NaN rows count as collapse, not as a violated or vacuous bound."""
    nan = pl.lit(float("nan"))
    broken = (pl.col("seed") == 1) & (pl.col("step") >= 40)
    names = ("J", "remainder", "penalty_mean", "penalty_max", "S")
    data = rows(curves(ppo=[0.5] * SEEDS)).with_columns(
        [pl.when(broken).then(nan).otherwise(pl.col(n)).alias(n) for n in names]
    )
    table = summarize(config("ppo"), data)
    assert table["bound_violations"][0] == 0
    assert table["diverged"][0] == 1
    one = runs(data).filter(pl.col("seed") == 1)
    assert one["vacuous_mean"].item() == 0.0
    assert findings(config("ppo"), table)[0].startswith("1 of 12 runs collapsed")
