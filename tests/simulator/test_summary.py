"""What may be said: final, failure, collapse, draws and both verdicts on rows made by hand."""

import numpy as np
import polars as pl
import pytest

from simlab.simulator.config import Config
from simlab.simulator.report import findings
from simlab.simulator.summary import MEANS, runs, summarize

SEEDS = 12
STEPS = list(range(0, 80, 10))  # 8 logged steps: the last eighth is the last one


def rows(curves):
    """Rows of {(arm, lag, seed): curve of J}; every other number is a constant."""
    out = []
    for (arm, lag, seed), curve in curves.items():
        for step, J in zip(STEPS, curve, strict=True):
            row = dict.fromkeys(MEANS, 0.1) | {"arm": arm, "lag": lag, "seed": seed, "step": step}
            row |= {"J": J, "d_max": 1.0, "skipped_steps": 0, "remainder": 0.1}
            row |= {"tokens": 30, "grad_norm": 0.5}
            out.append(row | {"penalty_mean": 0.5 if step < 40 else 2.0, "penalty_max": 3.0})
    return pl.DataFrame(out)


def ramp(final, peak=None):
    return [0.3, 0.4, 0.5, 0.6, peak or 0.7, 0.7, 0.7, final]


def config(*methods, **settings):
    few = {"lags": ("1",), "seeds": SEEDS, "noise": (), "healthy_lag": "1", "draws": 1}
    return Config(methods=methods, **(few | settings))


def judged(chosen, data):
    return summarize(chosen, runs(chosen, data))


def row(chosen, data, arm="sat"):
    return judged(chosen, data).row(by_predicate=pl.col("arm") == arm, named=True)


def curves(**finals):
    return {
        (arm, "1", seed): ramp(J) for arm, seeds in finals.items() for seed, J in enumerate(seeds)
    }


def test_final_peak_collapse_and_vacuous():
    """Final is the last eighth, collapse is below 0.7 of the run's own peak, J = NaN counts as 0."""
    data = curves(ppo=[0.9, 0.49, 0.48, float("nan"), 0.9, 0.9])
    table = runs(config("ppo"), rows(data)).sort("seed")
    assert table["final"].to_list() == [0.9, 0.49, 0.48, 0.0, 0.9, 0.9]
    assert table["peak"].to_list() == [0.9, 0.7, 0.7, 0.7, 0.9, 0.9]
    assert table["collapsed"].to_list() == [False, False, True, True, False, False]
    assert table["diverged"].to_list() == [False, False, False, True, False, False]
    assert table["vacuous_mean"][0] == 0.5
    assert table["vacuous_max"][0] == 1.0


def noisy(mean, scale=0.01, seed=0):
    return mean + scale * np.random.default_rng(seed).standard_normal(SEEDS)


def test_failing_is_ending_below_a_share_of_the_healthy_reference():
    """0.7 x the median of the reference's draws at the healthy lag, whatever a run's own peak was."""
    chosen = config("ppo", "ppo@1", "sat", lags=("8",), seeds=2)
    data = curves(sat=[0.55, 0.57])
    data = {
        (arm, "8", seed): [0.1] * 7 + [0.1 + curve[-1]] for (arm, _, seed), curve in data.items()
    }
    data |= {(arm, "8", seed): ramp(0.95) for arm in ("ppo", "ppo@1") for seed in (0, 1)}
    data |= {("ppo", "1", 0): ramp(0.93), ("ppo", "1", 1): ramp(0.93)}
    data |= {("ppo@1", "1", 0): ramp(0.95), ("ppo@1", "1", 1): ramp(0.99)}
    found = runs(chosen, rows(data)).filter(pl.col("arm") == "sat").sort("seed")
    assert found["bar"].to_list() == pytest.approx([0.7 * 0.94] * 2)
    assert found["failed"].to_list() == [True, False]
    assert found["collapsed"].to_list() == [False, False]
    assert judged(chosen, rows(data))["lag"].unique().to_list() == ["8"]
    with pytest.raises(ValueError, match="no run of ppo at lag 4"):
        runs(config("ppo", "sat", healthy_lag="4"), rows(data))


def test_a_rescue_is_a_verdict_on_risk_and_none_on_level():
    """The perfect method: it saves every failed seed and changes nothing else."""
    calm = {f"ppo{x}": noisy(0.9, seed=i) for i, x in enumerate(("", "@1", "@2"))}
    for i, finals in enumerate(calm.values()):
        finals[i::2] = 0.2
    chosen = config("ppo", "ppo@1", "ppo@2", "sat", lags=("8",))
    data = {
        (a, "8", s): ramp(J)
        for a, f in (calm | {"sat": noisy(0.9, seed=9)}).items()
        for s, J in enumerate(f)
    }
    data |= {(a, "1", s): ramp(0.9) for a in calm for s in range(SEEDS)}
    sat = row(chosen, rows(data))
    assert (sat["risk"], sat["level"]) == ("fails less", "not separated")
    assert (sat["failed"], sat["fail_reference"], sat["compared"]) == (
        0,
        pytest.approx(17 / 36),
        12,
    )
    text = " ".join(findings(chosen, judged(chosen, rows(data))))
    assert "Lag 8: ppo fails in 17 of 36 runs; fails less: sat (0 of 12)." in text
    other = row(
        Config(
            **chosen.model_dump()
            | {"reference": "sat", "healthy_lag": "8", "methods": ("sat", "ppo")}
        ),
        rows(data),
        "ppo",
    )
    assert (other["risk"], other["risk_p"]) == ("fails more", pytest.approx(2 / 2**6))  # McNemar


def test_a_level_is_judged_where_neither_failed():
    """One failure is no matter of level, and five seeds are too few for any."""
    finals = noisy(0.8)
    finals[3] = 0.0
    sat = row(config("ppo", "sat"), rows(curves(ppo=noisy(0.6, 0.001), sat=finals)))
    assert (sat["level"], sat["risk"], sat["compared"]) == ("above", "not separated", 11)
    assert sat["gain"] == pytest.approx(0.2, abs=0.02)
    assert 0 < sat["gain_low"] < sat["gain"] < sat["gain_high"]
    finals[:7] = 0.0
    sat = row(config("ppo", "sat"), rows(curves(ppo=noisy(0.6, 0.001), sat=finals)))
    assert (sat["level"], sat["gain"]) == ("too few lived", None)
    assert sat["risk"] == "fails more"
    below = row(config("ppo", "sat"), rows(curves(ppo=noisy(0.8), sat=noisy(0.7, seed=1))))
    assert below["level"] == "below"


def test_a_placebo_is_what_runs_the_very_rule_of_the_reference():
    """Labels say nothing; arguments at their defaults are the defaults; a stream is used once."""
    methods = ("ppo", "x=ppo@3:eps_low=0.2", "placebo-eps=ppo:eps_low=0.2001", "y=ppo@3", "z=ppo")
    assert config(*methods).placebos == ["x"]
    assert config(*methods, reference="placebo-eps").placebos == []


def test_draws_of_the_reference_are_added():
    """Up to three, with streams of their own; none to a lone reference; they alone run at the healthy lag."""
    chosen = config("ppo", "sat", "ppo@1", draws=3, healthy_lag="0")
    assert [(a.label, a.stream) for a in chosen.arms] == [
        ("ppo", 0),
        ("sat", 0),
        ("ppo@1", 1),
        ("ppo@2", 2),
    ]
    assert chosen.placebos == ["ppo@1", "ppo@2"]
    assert [(a.label, lag) for a, lag in chosen.plan if lag == "0"] == [
        ("ppo", "0"),
        ("ppo@1", "0"),
        ("ppo@2", "0"),
    ]
    assert config("ppo", draws=3).placebos == []
    assert len(config("ppo", "sat", lags=("sync", "1"), healthy_lag="0").plan) == 4


def test_a_placebo_is_compared_with_the_other_draws():
    """And its verdict is counted in a sentence of its own."""
    chosen = config("ppo", "ppo@1", "ppo@2")
    data = rows(
        curves(ppo=noisy(0.6), **{"ppo@1": noisy(0.6, seed=1), "ppo@2": noisy(0.7, seed=2)})
    )
    assert row(chosen, data, "ppo@2")["gain"] == pytest.approx(0.1, abs=0.02)
    assert row(chosen, data, "ppo@1")["gain"] == pytest.approx(0, abs=0.02)
    said = findings(chosen, judged(chosen, data))
    assert any(
        "of 2 comparisons of ppo with its own other draws, 1 is separated" in x for x in said
    )


def test_overlapping_arms_are_never_ranked():
    """Case C088: three seeds each, a gap inside the spread; no winner is named."""
    chosen = config("ppo", "sat", seeds=3)
    data = rows(curves(ppo=[0.30, 0.35, 0.39], sat=[0.33, 0.48, 0.40]))
    text = " ".join(findings(chosen, judged(chosen, data)))
    assert "Lag 1: no arm is separated from ppo in risk or level, and none is ranked." in text
    assert "no shift where runs live, and no difference in failures at all" in text
    assert "no other draws" in text


def test_ten_sentences_at_most():
    """Whatever the number of lags; what has no sentence of its own is in the matrix."""
    lags = tuple(map(str, range(1, 13)))
    chosen = config("ppo", "sat", "ppo@1", lags=lags)
    finals = {"ppo": noisy(0.6), "ppo@1": noisy(0.6, seed=1), "sat": noisy(0.8, seed=2)}
    data = rows(
        {(a, lag, s): ramp(J) for a, f in finals.items() for lag in lags for s, J in enumerate(f)}
    )
    said = findings(chosen, judged(chosen, data))
    assert len(said) <= 11
    assert any("Lag 6, Lag 7, Lag 8" in x and "matrix" in x for x in said)


def test_identical_arms_are_named():
    """Arms with the very same runs are named; arms that end alike but were cut differently are not."""
    data = rows(curves(ppo=noisy(0.6), sat=noisy(0.6)))
    chosen = config("ppo", "sat")
    said = "Identical to ppo, because the rule never acted: sat at lag 1."
    assert said in findings(chosen, judged(chosen, data))
    other = data.with_columns(pl.when(pl.col("arm") == "sat").then(0.2).otherwise(0.1).alias("cut"))
    assert said not in findings(chosen, judged(chosen, other))


def test_a_violated_bound_is_counted():
    """Remainder above both penalties, on every logged step of one run."""
    data = rows(curves(ppo=[0.5] * SEEDS)).with_columns(
        pl.when(pl.col("seed") == 2).then(9.0).otherwise(0.1).alias("remainder")
    )
    assert judged(config("ppo"), data)["bound_violations"][0] == 8


def test_a_diverged_run_violates_nothing():
    """NaN rows count as collapse, not as a violated or vacuous bound."""
    nan = pl.lit(float("nan"))
    broken = (pl.col("seed") == 1) & (pl.col("step") >= 40)
    names = ("J", "remainder", "penalty_mean", "penalty_max", "tv_sum")
    data = rows(curves(ppo=[0.5] * SEEDS)).with_columns(
        [pl.when(broken).then(nan).otherwise(pl.col(n)).alias(n) for n in names]
    )
    table = judged(config("ppo"), data)
    assert table["bound_violations"][0] == 0
    assert table["diverged"][0] == 1
    one = runs(config("ppo"), data).filter(pl.col("seed") == 1)
    assert one["vacuous_mean"].item() == 0.0
    assert findings(config("ppo"), table)[1].startswith("1 of 12 runs collapsed")


def test_a_clip_that_cannot_act_is_said():
    """With one optimizer step a batch, pi_old of the step itself is pi."""
    chosen = config("ppo", "decoupled:proximal=step")
    data = rows(curves(**{"ppo": noisy(0.6), "decoupled:proximal=step": noisy(0.7)}))
    said = findings(chosen, judged(chosen, data))
    assert any("decoupled:proximal=step: its clip cannot act" in x for x in said)
