"""From the runs of a comparison to a table with verdicts; the same rules in either world.

- score = exact J in the simulator, mean reward of a step's batch on real engines; where it is not a
  number, it is 0. final = mean score over the last eighth of the logged steps;
- a run failed if its final is below 0.7 x the median final of the reference at the healthy lag (0
  unless the settings say otherwise), so that a run which never learned failed too;
- the reference is pooled over its draws: arms with its very method and arguments and sampling draws
  of their own, three by default. A draw other than the reference's own is an arm of the table too,
  compared with the other draws: a placebo, which shows what chance does;
- risk: does an arm fail as often as the pooled reference, on the same seeds? An exact test that is
  McNemar's with one draw, corrected for all comparisons of the table (Holm);
- level: where neither failed, is its final that of the reference? Two rules, each with half of the
  error: the mean difference to one draw, by sign flips and the largest t of the table, and the exact
  interval of the median difference to a median of the draws. One that excludes 0 is a verdict, unless the other excludes it on the other side;
- a run that was not trained says so: `still` is the share of its logged steps with a gradient of exactly 0,
  `empty` that of its logged batches without a token;
- collapse = final < 0.7 x the run's own peak. On engines a score has sampling error, so the peak is that
  of a moving average as long as the last eighth.

The arithmetic is in rules.py, the sentences are in findings.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import polars as pl

from simlab.study import rules
from simlab.study.intervals import (
    columns,
    improvement,
    mean_interval,
    middle_mean,
    share_interval,
)
from simlab.study.settings import Comparison

COLLAPSE = 0.7
FAIL = 0.7
ACTED = {  # of the logged steps of a run: what its rule and its data did
    "idle": pl.col("unlike_ppo").eq_missing(0).mean(),
    "still": pl.col("grad_norm").eq_missing(0).mean(),
    "empty": pl.col("tokens").eq_missing(0).mean(),
    "grad_norm": pl.col("grad_norm").fill_nan(None).mean(),
}
ANSWERED = (  # columns that a lone reference has empty
    *("fail_reference", "risk_p", "compared", "gain", "gain_low", "gain_high"),
    *("typical", "typical_low", "typical_high", "gain_p", "shift_seen", "failures_seen"),
)


def runs(
    rows: pl.DataFrame,
    by: Sequence[str],
    score: str,
    diverged: pl.Expr,
    more: Sequence[pl.Expr] = (),
    smooth: bool = False,
) -> pl.DataFrame:
    """One row per run, i.e. per value of `by`: final, peak, collapsed, diverged, and what `more` says.

    `rows` are one per logged step, in order. `smooth` is for scores with sampling error.
    """
    steps = rows["step"].unique().sort()
    eighth = max(len(steps) // 8, 1)
    value = pl.col(score).fill_nan(0.0)
    last = pl.col("step").is_in(steps[-eighth:].implode())
    frame = rows.group_by(*by, maintain_order=True).agg(
        value.filter(last).mean().alias("final"),
        (value.rolling_mean(eighth) if smooth else value).max().alias("peak"),
        diverged.alias("diverged"),
        *more,
        **ACTED,
    )
    return frame.with_columns((pl.col("final") < COLLAPSE * pl.col("peak")).alias("collapsed"))


def judged(config: Comparison, per_run: pl.DataFrame) -> pl.DataFrame:
    """`runs` with `bar`, the final below which a run failed, and `failed`.

    Of several groups at the healthy lag (replays, points of a sweep) the one with the best median counts.
    """
    pooled = pl.col("arm").is_in([config.reference, *config.placebos])
    healthy = per_run.filter(pooled & (pl.col("lag") == config.healthy))
    others = [name for name in config.groups if name != "lag"]
    medians = healthy.group_by(*others).agg(pl.col("final").median()) if others else healthy
    best = medians["final"].max() if others else medians["final"].median()
    if not isinstance(best, float):
        raise ValueError(f"there is no run of {config.reference} at lag {config.healthy}")
    bar = FAIL * best
    return per_run.with_columns(pl.lit(bar).alias("bar"), (pl.col("final") < bar).alias("failed"))


def summarize(
    config: Comparison,
    per_run: pl.DataFrame,
    means: Sequence[str] = (),
    largest: Sequence[str] = (),
    totals: Sequence[str] = (),
) -> pl.DataFrame:
    """One row per group and arm, in the order of the settings, from `judged` runs.

    `means`, `largest` and `totals` are more columns of `per_run`, reduced over seeds. Other columns as in
    docs/results.md.
    """
    rng = np.random.default_rng(0)
    draws = [config.reference, *config.placebos]
    numbers = ["final", "peak", *ACTED, *means, *largest, *totals]
    numbers = [name for name in numbers if name != "seconds"]  # two equal runs differ in it
    bar, table, arm_finals, pools = per_run["bar"][0], [], [], []
    for group in groups(config):
        here = per_run.filter(*[pl.col(name) == value for name, value in group.items()]).sort(
            "seed"
        )
        of_arm = {arm.label: here.filter(pl.col("arm") == arm.label) for arm in config.arms}
        finals = {label: frame["final"].to_numpy() for label, frame in of_arm.items()}
        reference = of_arm[config.reference]
        for arm in config.arms:
            mine, final = of_arm[arm.label], finals[arm.label]
            others = [finals[x] if x != arm.label else np.full(len(mine), np.nan) for x in draws]
            row = {"arm": arm.label, "method": arm.name} | group | {"seeds": len(mine), "bar": bar}
            row |= columns("final", mean_interval(final))
            row |= columns("iqm", middle_mean(final, rng))
            row["failed"] = int(mine["failed"].sum())
            row |= columns("fail", share_interval(row["failed"], len(mine)))
            if arm.label != config.reference:
                pool = np.stack(others, -1)
                known = pool[~np.isnan(pool)]
                row |= columns("improvement", improvement(final, known, rng))
                arm_finals.append(final)
                pools.append(pool)
            row["collapsed"] = int(mine["collapsed"].sum())
            row |= columns("collapse", share_interval(row["collapsed"], len(mine)))
            row |= {"diverged": int(mine["diverged"].sum()), "peak": mine["peak"].mean()}
            row |= {name: mine[name].mean() for name in (*ACTED, *means)}
            row |= {name: mine[name].max() for name in largest}
            row |= {name: int(mine[name].sum()) for name in totals}
            same = mine.select("seed", *numbers).equals(reference.select("seed", *numbers))
            row["same_as_reference"] = same and arm.label != config.reference
            row["seeds_alike"] = len(mine) > 1 and mine.select(numbers).n_unique() == 1
            table.append(row)
    for row in table:
        row |= dict.fromkeys(ANSWERED) | {"risk": "reference", "level": "reference"}
    if pools:
        _answer(config, table, np.stack(arm_finals, 1), np.stack(pools, 1), rng)
    return pl.DataFrame(table, infer_schema_length=None)


def groups(config: Comparison) -> list[dict[str, str]]:
    """Within what arms are compared: every lag, or every lag and replay."""
    names = config.groups
    return [dict(zip(names, values, strict=True)) for values in product(*names.values())]


def comparisons(config: Comparison) -> int:
    """How many comparisons one table holds: every other arm in every group."""
    return max((len(config.arms) - 1) * prod(map(len, config.groups.values())), 1)


def _answer(
    config: Comparison,
    table: list[dict],
    finals: np.ndarray,
    pools: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Both verdicts into the rows, and what the page could have seen; arrays as in rules.py."""
    many, bar = comparisons(config), table[0]["bar"]
    answers = rules.answer(finals, pools, bar, rng)
    difference, _ = rules.survivors(finals, pools, bar)
    seen = {
        "shift_seen": rules.smallest_shift(difference, many),
        "failures_seen": rules.fewest_failures(len(finals), pools.shape[2], many, rng),
    }
    for row in table:
        row |= seen
    rest = (row for row in table if row["arm"] != config.reference)
    for i, row in enumerate(rest):
        here: dict = {name: _number(x[i]) for name, x in answers._asdict().items()}
        row |= {name: here[name] for name in ("fail_reference", "risk_p", "gain_p")}
        words = {True: "fails more", False: "fails less"}
        separated = here["risk_p"] <= rules.ALPHA
        row["risk"] = words[row["fail"] > here["fail_reference"]] if separated else "not separated"
        row["compared"] = int(here["compared"])
        for name in ("gain", "typical"):
            row |= {x: here[x] for x in (name, f"{name}_low", f"{name}_high")}
        words = {0: "not separated", 1: "above", -1: "below"}
        row["level"] = "too few lived" if here["gain"] is None else words[int(here["side"])]


def _number(x: np.number) -> float | None:
    return None if np.isnan(x) else float(x)
