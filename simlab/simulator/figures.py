"""The figures of a comparison. Each function takes rows, runs and summary and returns a matplotlib Figure."""

from __future__ import annotations

import numpy as np
import polars as pl
import seaborn as sns
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from simlab.simulator.config import Config
from simlab.simulator.summary import VACUOUS
from simlab.study.forest import level, profiles, risk
from simlab.study.style import ROW, TINY, colours, dashes, label_ends, legend, own_arms, panels

PAPER = (0.009, 0.03)  # nats: mean |d| of the SAT paper's runs, from lag 1 to lag 8
FLOOR = 1e-4  # of 1 - J


def learning_curves(config: Config, rows: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame):
    """1 - J over steps, median and quartiles; a column per lag, arms split over rows, baselines first."""
    palette, dash = colours(config), dashes(config)
    own, names = own_arms(config), {a.label: a.name for a in config.arms}
    baselines = {"none", "pg", "ppo"}
    kinds = [[x for x in own if (names[x] in baselines) == first] for first in (True, False)]
    groups = [kind[i : i + ROW] for kind in kinds for i in range(0, len(kind), ROW)]
    fig, axes = panels(len(groups) or 1, len(config.lags), 3.3, 2.7, sharey=True)
    distance = (1 - pl.col("J").fill_nan(0.0)).clip(lower_bound=FLOOR).alias("distance")
    rows = rows.with_columns(distance)
    best = max(FLOOR, 0.7 * rows["distance"].quantile(0.01))  # pyright: ignore[reportOptionalOperand]
    for column, lag in enumerate(config.lags):
        for row, group in enumerate(groups or [[]]):
            ax, ends = axes[row, column], {}
            for label in [*config.placebos, config.reference, *group]:
                curve = rows.filter((pl.col("arm") == label) & (pl.col("lag") == lag))
                steps = curve["step"].unique().sort()
                low, middle, high = _quartiles(curve, "distance")
                ax.plot(steps, middle, color=palette[label], ls=dash[label], lw=1.5, label=label)
                if label not in config.placebos:
                    ax.fill_between(steps, low, high, color=palette[label], alpha=0.1, lw=0)
                    ends[label] = middle[-1], palette[label]
            ax.set(yscale="log", ylim=(1, best))
            ax.set(title=f"lag {lag}" if row == 0 else None)
            ax.set(xlabel="optimizer step" if row == axes.shape[0] - 1 else None)
            label_ends(ax, ends)
    for row in range(axes.shape[0]):
        axes[row, 0].set_ylabel("1 - J (exact, up is better)")
    return fig


def mismatch_tail(config: Config, rows: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame):
    """|d| of the reference arm by lag: quantiles on the left, its two parts on the right."""
    frame = table.filter(pl.col("arm") == config.reference)
    fig, axes = panels(1, 2, 4.6, 3.0)
    x = np.arange(len(config.lags))
    left = {
        "d_q50": "median",
        "d_bar": "mean",
        "d_q90": "90 %",
        "d_q99": "99 %",
        "d_max": "largest seen",
    }
    right = {"d_policy": "policy part", "d_engine": "engine part", "d_bar": "both"}
    for ax, names in zip(axes[0], (left, right), strict=True):
        for (column, name), colour in zip(
            names.items(), sns.color_palette("viridis", len(names)), strict=True
        ):
            ax.plot(x, np.maximum(frame[column].to_numpy(), TINY), "o-", color=colour, label=name)
        ax.axhline(np.log(1.2), color="0.4", ls="--", lw=0.8, label="log 1.2, PPO's radius")
        ax.axhspan(*PAPER, color="0.5", alpha=0.2, lw=0, label="mean in the SAT paper")
        ax.set(xticks=x, xticklabels=config.lags, xlabel="lag", ylabel="|d| (nats)", yscale="log")
        legend(ax)
    return fig


def clip_share(config: Config, rows: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame):
    """Tokens cut, tokens treated unlike PPO, and batches without such a token, in percent, arm by lag."""
    columns = {
        "cut": "gradient cut\n(% of tokens)",
        "unlike_ppo": "not as PPO 0.2\n(% of tokens)",
        "idle": "no token unlike PPO\n(% of batches)",
    }
    fig, axes = panels(1, 3, 0.55 * len(config.lags) + 1.2, 0.26 * len(config.arms) + 1.1)
    for ax, (column, title) in zip(axes[0], columns.items(), strict=True):
        grid = table.pivot("lag", index="arm", values=column)
        values = 100 * grid.drop("arm").to_numpy().astype(float)
        scale = {"vmin": 0, "vmax": 100} if column == "idle" else {"norm": LogNorm(0.1, 100)}
        text = np.vectorize(lambda x: f"{x:.2g}" if x < 10 else f"{x:.0f}")(values)
        sns.heatmap(
            values if column == "idle" else values.clip(0.1), ax=ax, annot=text, fmt="", cmap="Blues", cbar=False,
            xticklabels=config.lags, yticklabels=grid["arm"].to_list() if column == "cut" else False,
            annot_kws={"size": 8}, **scale,
        )  # fmt: skip
        ax.set_title(title, fontsize=8)
        ax.set_xlabel("lag")
        ax.tick_params(length=0)
    return fig


def bound(config: Config, rows: pl.DataFrame, runs: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """The two penalties against what they must cover, for the reference arm; dashed = vacuous."""
    fig, axes = panels(1, len(config.lags), 2.9, 2.9, sharey=True)
    named = {
        "penalty_max": ("max form (33)", "#D55E00", "--"),
        "penalty_mean": ("average form (34)", "#E69F00", "-."),
        "remainder": ("truth: |L' - (J - J_mu)|", "#0072B2", "-"),
    }
    for ax, lag in zip(axes[0], config.lags, strict=True):
        frame = rows.filter((pl.col("arm") == config.reference) & (pl.col("lag") == lag))
        for column, (name, colour, dash) in named.items():
            low, mid, high = _quartiles(frame, column)
            steps = frame["step"].unique().sort()
            ax.plot(steps, mid, color=colour, ls=dash, label=name)
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
        ax.axhline(VACUOUS, color="0.3", ls=":", lw=0.8)
        row = table.filter((pl.col("arm") == config.reference) & (pl.col("lag") == lag))
        shares = [
            "none" if x is None else f"{100 * (1 - x):.0f} %"
            for x in (row["vacuous_mean"].item(), row["vacuous_max"].item())
        ]
        ax.set_title(f"lag {lag}\ncertified on {shares[0]} / {shares[1]}", fontsize=8)
        ax.set(yscale="log", xlabel="optimizer step")
    axes[0, 0].set_ylabel("reward")
    legend(axes[0, -1])
    return fig


FIGURES = {
    "learning_curves": learning_curves,
    "risk": lambda config, rows, runs, table: risk(config, table),
    "level": lambda config, rows, runs, table: level(config, table),
    "profiles": lambda config, rows, runs, table: profiles(config, runs, table),
    "mismatch_tail": mismatch_tail,
    "clip_share": clip_share,
    "bound": bound,
}


def _quartiles(frame: pl.DataFrame, column: str):
    """First quartile, median, third quartile over seeds of |column|, by step."""
    x = pl.col(column).fill_nan(None).abs().clip(lower_bound=TINY)
    grouped = frame.group_by("step").agg(
        x.quantile(0.25).alias("low"), x.median().alias("mid"), x.quantile(0.75).alias("high")
    )
    grouped = grouped.sort("step")
    return grouped["low"], grouped["mid"], grouped["high"]
