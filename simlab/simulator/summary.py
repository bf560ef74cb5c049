"""The runs of the simulator and their table, by the rules of study/verdicts.py; the score is exact J."""

from __future__ import annotations

import polars as pl

from simlab.simulator.config import Config
from simlab.study import verdicts
from simlab.study.findings import findings as common

VACUOUS = 1.0  # the range of J for rewards in [0, 1]
TOLERANCE = 1e-12  # float64 rounding in L' - (J - J_mu)
MEANS = (
    *("d_bar", "d_q50", "d_q90", "d_q99", "d_policy", "d_engine"),
    *("cut", "unlike_ppo", "flat_groups", "ess", "tv_sum"),
)
BOUNDS = ("vacuous_mean", "vacuous_max")


def runs(config: Config, rows: pl.DataFrame) -> pl.DataFrame:
    """One row per arm, group and seed: final and peak J, failure, collapse, and means over the logged steps.

    A run whose weights stop being finite (`diverged`) has J = 0 from then on.
    """
    finite = pl.col("J").is_finite() & pl.col("penalty_mean").is_finite()
    smallest = pl.min_horizontal("penalty_mean", "penalty_max")
    per_run = verdicts.runs(
        rows,
        ("arm", *config.groups, "seed"),
        "J",
        diverged=(pl.col("J").is_nan() & (pl.col("step") == rows["step"].max())).any(),
        more=[
            pl.col("skipped_steps").max(),
            *[pl.col(name).fill_nan(None).mean() for name in MEANS],
            pl.col("d_max").fill_nan(None).max(),
            (pl.col("penalty_mean") > VACUOUS).filter(finite).mean().alias("vacuous_mean"),
            (pl.col("penalty_max") > VACUOUS).filter(finite).mean().alias("vacuous_max"),
            (pl.col("remainder") > smallest + TOLERANCE)
            .filter(finite)
            .sum()
            .alias("bound_violations"),
        ],
    )
    return verdicts.judged(config, per_run)


def summarize(config: Config, per_run: pl.DataFrame) -> pl.DataFrame:
    """One row per lag and arm, in the order of the config, from `runs`."""
    return verdicts.summarize(
        config,
        per_run,
        means=(*MEANS, *BOUNDS),
        largest=("d_max",),
        totals=("skipped_steps", "bound_violations"),
    )


def findings(config: Config, table: pl.DataFrame) -> list[str]:
    """What the intervals allow to be said, and how the improvement bound fared."""
    return [*common(config, table), *([] if config.axes else [_bound_sentence(config, table)])]


def _bound_sentence(config: Config, table: pl.DataFrame) -> str:
    mine = table.filter(pl.col("arm") == config.reference)
    shares = [
        f"{100 * (1 - r['vacuous_mean']):.0f} / {100 * (1 - r['vacuous_max']):.0f} % at lag {r['lag']}"
        for r in mine.drop_nulls("vacuous_mean").iter_rows(named=True)
    ]
    broken = int(table["bound_violations"].sum())
    return (
        f"The improvement bound (average / max form) certified {', '.join(shares)} of the logged "
        f"steps of {config.reference}, and was violated on {broken} of all logged steps."
        + (
            " Violations are possible only where the engine truncates its support."
            if broken
            else ""
        )
    )
