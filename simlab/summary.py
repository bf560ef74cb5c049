"""From logged rows to a table: final J, paired differences, collapse, and what may be said.

Rules, the same for every arm:
- final = mean J over the last eighth of the logged steps; a run whose weights stop being finite
  (`diverged`) has J = 0 from then on;
- collapse = final < .7 x the run's own peak J;
- difference = final minus the reference arm's final, seed by seed: its mean with a 95 % Student-t
  interval, and its median with an exact interval that holds for all comparisons of the table at once
  (Bonferroni);
- placebo spread of a lag = the largest |median difference| there among the placebo arms, which run
  the reference's own method;
- verdict "above" or "below": the exact interval of the median lies outside [-spread, +spread]. It is
  about the typical seed; the risk of collapse is told apart, with its own exact interval.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from simlab.config import Comparison, Config
from simlab.intervals import columns, mean_interval, median_interval, share_interval

COLLAPSE = 0.7
VACUOUS = 1.0  # the range of J for rewards in [0, 1]
TOLERANCE = 1e-12  # float64 rounding in L' - (J - J_mu)
MEANS = (
    *("d_bar", "d_q50", "d_q90", "d_q99", "d_policy", "d_impl"),
    *("cut", "unlike_ppo", "flat_groups", "ess", "S"),
)


def runs(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per arm, lag and seed: final and peak J, collapse, and means over the logged steps."""
    last = rows["step"].max()
    steps = rows["step"].unique().sort()
    tail = steps[-max(len(steps) // 8, 1) :]
    J = pl.col("J").fill_nan(0.0)
    finite = pl.col("J").is_finite() & pl.col("penalty_mean").is_finite()
    smallest = pl.min_horizontal("penalty_mean", "penalty_max")
    out = rows.group_by("arm", "lag", "seed", maintain_order=True).agg(
        J.filter(pl.col("step").is_in(tail.implode())).mean().alias("final"),
        J.max().alias("peak"),
        (pl.col("J").is_nan() & (pl.col("step") == last)).any().alias("diverged"),
        pl.col("skipped_steps").max(),
        *[pl.col(name).fill_nan(None).mean() for name in MEANS],
        pl.col("d_max").fill_nan(None).max(),
        (pl.col("penalty_mean") > VACUOUS).filter(finite).mean().alias("vacuous_mean"),
        (pl.col("penalty_max") > VACUOUS).filter(finite).mean().alias("vacuous_max"),
        (pl.col("remainder") > smallest + TOLERANCE).filter(finite).sum().alias("bound_violations"),
    )
    return out.with_columns((pl.col("final") < COLLAPSE * pl.col("peak")).alias("collapsed"))


def summarize(config: Config, rows: pl.DataFrame) -> pl.DataFrame:
    """One row per arm and lag, in the order of the config; columns as in the module docstring."""
    per_run = runs(rows)
    level = 1 - 0.05 / comparisons(config)
    table = []
    for lag in config.lags:
        at_lag = {
            label[0]: frame.sort("seed")
            for label, frame in per_run.filter(pl.col("lag") == lag).group_by("arm")
        }
        reference = at_lag[config.reference]
        for arm in config.arms:
            frame = at_lag[arm.label]
            final = frame["final"].to_numpy()
            row = {"arm": arm.label, "method": arm.name, "lag": lag, "seeds": len(final)}
            row |= paired(final, reference["final"].to_numpy(), level)
            collapsed = int(frame["collapsed"].sum())
            row |= {"collapsed": collapsed}
            row |= columns("collapse", share_interval(collapsed, len(final)))
            row |= {"diverged": int(frame["diverged"].sum()), "peak": frame["peak"].mean()}
            row |= {name: frame[name].mean() for name in (*MEANS, "vacuous_mean", "vacuous_max")}
            row |= {
                "d_max": frame["d_max"].max(),
                "skipped_steps": int(frame["skipped_steps"].sum()),
            }
            row["bound_violations"] = int(frame["bound_violations"].sum())
            same = frame.drop("arm").equals(reference.drop("arm"))
            row["same_as_reference"] = same and arm.label != config.reference
            table.append(row)
    return verdicts(config, pl.DataFrame(table, infer_schema_length=None), "lag")


def comparisons(config: Config) -> int:
    """How many differences one table shows: every other arm at every lag."""
    return max((len(config.arms) - 1) * len(config.lags), 1)


def paired(final: np.ndarray, reference: np.ndarray, level: float) -> dict[str, float]:
    """Columns final, diff and typical of an arm, seed by seed: means with Student-t intervals, and
    the median difference with its exact interval at `level`."""
    diff = final - reference
    found = columns("final", mean_interval(final)) | columns("diff", mean_interval(diff))
    return found | columns("typical", median_interval(diff, level))


def verdicts(config: Comparison, table: pl.DataFrame, *by: str) -> pl.DataFrame:
    """The table with `placebo_spread` (0 without placebo arms) and `verdict`, within each group of `by`."""
    placebo = pl.col("arm").is_in(config.placebos)
    spread = pl.col("typical").abs().filter(placebo).max().over(by).fill_null(0.0)
    table = table.with_columns(spread.alias("placebo_spread"))
    above = pl.col("typical_low").fill_nan(-np.inf) > pl.col("placebo_spread")
    below = pl.col("typical_high").fill_nan(np.inf) < -pl.col("placebo_spread")
    return table.with_columns(
        pl.when(pl.col("arm") == config.reference)
        .then(pl.lit("reference"))
        .when(above)
        .then(pl.lit("above"))
        .when(below)
        .then(pl.lit("below"))
        .otherwise(pl.lit("not separated"))
        .alias("verdict")
    )


def placebo_sentence(config: Comparison, table: pl.DataFrame) -> str:
    """How often a placebo arm's own interval excludes zero; empty without placebo arms."""
    placebo = table.filter(pl.col("arm").is_in(config.placebos))
    if not len(placebo):
        return ""
    off = placebo.filter((pl.col("diff_low") > 0) | (pl.col("diff_high") < 0))
    return (
        f"Of {len(placebo)} placebo comparisons (arms that differ from {config.reference} by nothing that "
        f"matters), {len(off)} had a 95 % interval of the mean that excludes zero."
    )
