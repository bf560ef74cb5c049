"""Figures of `scaleup compare` that the simulator has not: curves of a column, ages and mismatch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import seaborn as sns
from matplotlib.figure import Figure

from scaleup.recipe import Recipe
from simlab.study.intervals import mean_interval
from simlab.study.style import colours, dashes
from simlab.token_log.files import steps


def curves(recipe: Recipe, rows: pl.DataFrame, column: str) -> Figure:
    """A column over steps, a panel for each lag and replay."""
    panels = [(lag, replay) for replay in recipe.world.replay for lag in recipe.lags]
    across = len(recipe.lags)
    down = len(panels) // across
    fig = Figure(figsize=(4.6 * across + 1.4, 2.9 * down))
    axes = np.atleast_1d(fig.subplots(down, across, sharex=True, sharey=True)).ravel()
    colour, dash = colours(recipe), dashes(recipe)
    for ax, (lag, replay) in zip(axes, panels, strict=True):
        for arm in recipe.arms:
            logged = rows.filter(
                (pl.col("arm") == arm.label) & (pl.col("lag") == lag) & (pl.col("replay") == replay)
            )
            wide = logged.pivot("seed", index="step", values=column).sort("step")
            x = wide.drop("step").to_numpy()
            middle, low, high = np.array([mean_interval(values) for values in x]).T
            if column in ("reward", "cut"):  # shares
                low, high = low.clip(0, 1), high.clip(0, 1)
            ax.plot(
                wide["step"],
                middle,
                color=colour[arm.label],
                ls=dash[arm.label],
                lw=1.3,
                label=arm.label,
            )
            ax.fill_between(wide["step"], low, high, color=colour[arm.label], alpha=0.12, lw=0)
        ax.set_title(f"lag {lag}, replay {replay}")
        if column == "d_bar" and (rows[column].cast(pl.Float64) > 0).any():
            ax.set_yscale("log")
    fig.supxlabel("optimizer step")
    fig.supylabel({"d_bar": "d-bar (nats)", "cut": "share of tokens"}.get(column, column))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return fig


def histograms(logs: list[tuple[str, Path]]) -> Figure:
    """Ages of tokens, and the tail of |d| by lag and age, pooled over the logs of a lag."""
    fig = Figure(figsize=(9.5, 3.4))
    left, right = fig.subplots(1, 2)
    lags = list(dict.fromkeys(lag for lag, _ in logs))
    colour = dict(zip(lags, sns.color_palette("husl", len(lags)), strict=True))
    for i, lag in enumerate(lags):
        mine = [path for log_lag, folder in logs if log_lag == lag for path in steps(folder)]
        sampled = pl.concat([tokens(path) for path in mine])
        ages = sampled["age"].value_counts(sort=False).sort("age")
        width = 0.8 / len(lags)
        share = ages["count"] / len(sampled)
        left.bar(
            ages["age"] + (i - len(lags) / 2 + 0.5) * width,
            share,
            width,
            color=colour[lag],
            label=f"lag {lag}",
        )
        d = np.sort(sampled["d"].to_numpy())
        right.plot(
            d, 1 - np.arange(len(d)) / len(d), color=colour[lag], label=f"lag {lag}: trainer now"
        )
        if "engine" in sampled.columns:
            e = np.sort(sampled["engine"].to_numpy())
            right.plot(
                e,
                1 - np.arange(len(e)) / len(e),
                color=colour[lag],
                ls=":",
                label=f"lag {lag}: engine alone",
            )
    left.set_xlabel("age (optimizer steps)")
    left.set_ylabel("share of tokens")
    left.legend(frameon=False)
    right.set(
        xscale="log",
        yscale="log",
        xlabel="|d| (nats)",
        ylabel="share of tokens above",
        xlim=(1e-5, None),
    )
    right.legend(frameon=False, fontsize=7)
    return fig


def tokens(path: Path) -> pl.DataFrame:
    """Age, |d| and, where known, |d| of the engine alone of the tokens of a log file."""
    rows = pl.read_parquet(path)
    names = ["loss_mask", "weight_versions", "trainer_logprobs", "rollout_logprobs"]
    before = "trainer_logprobs_before"
    names += [before] if before in rows.columns else []
    flat = rows.select("trainer_version", *names).explode(names).filter(pl.col("loss_mask") == 1)
    mu = pl.col("rollout_logprobs")
    more = [(pl.col(before) - mu).abs().alias("engine")] if before in rows.columns else []
    return flat.select(
        (pl.col("trainer_version") - pl.col("weight_versions")).alias("age"),
        (pl.col("trainer_logprobs") - mu).abs().alias("d"),
        *more,
    )
