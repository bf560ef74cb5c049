"""The figures of a comparison. Each function takes rows and summary and returns a matplotlib Figure."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg", force=True)  # no display is ever needed

import numpy as np
import polars as pl
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simlab.config import Comparison, Config
from simlab.intervals import mean_interval
from simlab.summary import VACUOUS

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "simlab",
}
matplotlib.rcParams.update(STYLE)
REFERENCE, PLACEBO = "black", "0.65"
TINY = 1e-6  # the floor of logarithmic axes
ROW = 7  # learning curves in one panel, besides reference and placebos


def colours(config: Comparison) -> dict[str, object]:
    """One colour per arm, the same in every figure; the reference black, placebos grey."""
    own = _own(config)
    many = len(own) > 2 * ROW  # hues of their own would no longer be told apart
    hues = sns.color_palette("husl", ROW if many else len(own))
    table = {label: hues[i % len(hues)] for i, label in enumerate(own)}
    return {a.label: table.get(a.label, PLACEBO) for a in config.arms} | {
        config.reference: REFERENCE
    }


def learning_curves(config: Config, rows: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """Mean J over steps with 95 % bands; a column per lag, arms split over rows, baselines first."""
    palette = colours(config)
    own, names = _own(config), {a.label: a.name for a in config.arms}
    baselines = {"none", "pg", "ppo"}
    kinds = [[x for x in own if (names[x] in baselines) == first] for first in (True, False)]
    groups = [kind[i : i + ROW] for kind in kinds for i in range(0, len(kind), ROW)]
    fig, axes = _grid(len(groups) or 1, len(config.lags), 3.0, 2.7)
    backdrop = [*config.placebos, config.reference]
    for column, lag in enumerate(config.lags):
        for row, group in enumerate(groups or [[]]):
            ax = axes[row, column]
            for label in [*backdrop, *group]:
                curve = rows.filter((pl.col("arm") == label) & (pl.col("lag") == lag))
                steps, mean, low, high = _band(curve, "J")
                ax.plot(steps, mean, color=palette[label], lw=1.5, label=label)
                if label not in config.placebos:
                    ax.fill_between(steps, low, high, color=palette[label], alpha=0.12, lw=0)
            ax.set(ylim=(0, 1), title=f"lag {lag}" if row == 0 else None)
            ax.set(xlabel="optimizer step" if row == axes.shape[0] - 1 else None)
    for row in range(axes.shape[0]):
        axes[row, 0].set_ylabel("J (exact)")
        _legend(axes[row, -1])
    return fig


def final_difference(config: Config, rows: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """Final J minus the reference's, by seed: mean with 95 % (dot, thick), median with the exact
    simultaneous interval (tick, thin; none where the seeds are too few for one)."""
    fig, axes = _forest(config, f"final J minus {config.reference}, paired")
    for ax, lag in zip(axes, config.lags, strict=True):
        frame = table.filter(pl.col("lag") == lag)
        spread = frame["placebo_spread"][0]
        ax.axvspan(-spread, spread, color="0.9", lw=0)
        ax.axvline(0, color="0.4", lw=0.8)
        _whiskers(config, ax, frame, "typical_low", "typical_high", 0.8, "typical", "|")
        _whiskers(config, ax, frame, "diff_low", "diff_high", 2.6, "diff")
    return fig


def final_level(config: Config, rows: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """Final J with its 95 % interval over seeds."""
    fig, axes = _forest(config, "final J")
    for ax, lag in zip(axes, config.lags, strict=True):
        _whiskers(
            config, ax, table.filter(pl.col("lag") == lag), "final_low", "final_high", 2.6, "final"
        )
        ax.set_xlim(0, 1)
    return fig


def collapse(config: Config, rows: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """Share of seeds that collapsed, exact 95 % binomial interval."""
    fig, axes = _forest(config, "P(collapse)")
    for ax, lag in zip(axes, config.lags, strict=True):
        frame = table.filter(pl.col("lag") == lag)
        _whiskers(config, ax, frame, "collapse_low", "collapse_high", 2.6, "collapse")
        ax.set_xlim(-0.02, 1.02)
    return fig


def mismatch_tail(config: Config, rows: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """|d| of the reference arm by lag: quantiles on the left, its two parts on the right."""
    frame = table.filter(pl.col("arm") == config.reference)
    fig, axes = _grid(1, 2, 4.6, 3.0)
    x = np.arange(len(config.lags))
    left = {
        "d_q50": "median",
        "d_bar": "mean",
        "d_q90": "90 %",
        "d_q99": "99 %",
        "d_max": "largest seen",
    }
    right = {"d_policy": "policy part", "d_impl": "implementation part", "d_bar": "both"}
    for ax, names in zip(axes[0], (left, right), strict=True):
        for (column, name), colour in zip(
            names.items(), sns.color_palette("viridis", len(names)), strict=True
        ):
            ax.plot(x, np.maximum(frame[column].to_numpy(), TINY), "o-", color=colour, label=name)
        ax.set(xticks=x, xticklabels=config.lags, xlabel="lag", ylabel="|d| (nats)", yscale="log")
        _legend(ax)
    return fig


def clip_share(config: Config, rows: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """Tokens whose gradient is cut, and tokens treated unlike PPO, in percent, arm by lag."""
    fig, axes = _grid(1, 2, 3.6, 0.28 * len(config.arms) + 0.9)
    titles = {"cut": "gradient cut (% of tokens)", "unlike_ppo": "not as PPO .2 (% of tokens)"}
    for ax, (column, title) in zip(axes[0], titles.items(), strict=True):
        grid = table.pivot("lag", index="arm", values=column)
        values = 100 * grid.drop("arm").to_numpy()
        sns.heatmap(
            values, ax=ax, annot=True, fmt=".1f", cmap="rocket_r", vmin=0, vmax=60, cbar=False,
            xticklabels=config.lags, yticklabels=grid["arm"].to_list() if column == "cut" else False,
            annot_kws={"size": 8},
        )  # fmt: skip
        ax.set(title=title, xlabel="lag")
        ax.tick_params(length=0)
    return fig


def bound(config: Config, rows: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """The two penalties against what they must cover, for the reference arm; dashed = vacuous."""
    fig, axes = _grid(1, len(config.lags), 2.9, 2.9, sharey=True)
    named = {
        "penalty_max": ("max form (33)", "tab:red"),
        "penalty_mean": ("average form (34)", "tab:orange"),
        "remainder": ("truth: |L' - (J - J_mu)|", "tab:blue"),
    }
    for ax, lag in zip(axes[0], config.lags, strict=True):
        frame = rows.filter((pl.col("arm") == config.reference) & (pl.col("lag") == lag))
        for column, (name, colour) in named.items():
            low, mid, high = _quartiles(frame, column)
            steps = frame["step"].unique().sort()
            ax.plot(steps, mid, color=colour, label=name)
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
        ax.axhline(VACUOUS, color="0.3", ls="--", lw=0.8)
        mine = table.filter((pl.col("arm") == config.reference) & (pl.col("lag") == lag))
        share = [f"{100 * mine[c][0]:.0f} %" for c in ("vacuous_max", "vacuous_mean")]
        ax.set(yscale="log", xlabel="optimizer step")
        ax.set_title(f"lag {lag}\nvacuous: max {share[0]}, average {share[1]}", fontsize=9)
    axes[0, 0].set_ylabel("reward units")
    _legend(axes[0, -1])
    return fig


FIGURES = {
    "learning_curves": learning_curves,
    "final_difference": final_difference,
    "final_level": final_level,
    "collapse": collapse,
    "mismatch_tail": mismatch_tail,
    "clip_share": clip_share,
    "bound": bound,
}


def _own(config: Comparison) -> list[str]:
    """Labels of the arms that are neither the reference nor a placebo."""
    return [a.label for a in config.arms if a.label not in (config.reference, *config.placebos)]


def _grid(rows: int, columns: int, width: float, height: float, sharey: bool = False):
    fig = Figure(figsize=(width * columns + 1.2, height * rows))
    return fig, fig.subplots(rows, columns, squeeze=False, sharey=sharey)


def _legend(ax) -> None:
    """To the right of the axes, never on the data."""
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def _forest(config: Config, xlabel: str):
    """A panel per lag with arms on the y axis, in the order of the config: never sorted by result."""
    fig, axes = _grid(1, len(config.lags), 2.6, 0.26 * len(config.arms) + 1.0, sharey=True)
    labels = [a.label for a in config.arms]
    for ax, lag in zip(axes[0], config.lags, strict=True):
        ax.set(title=f"lag {lag}", xlabel=xlabel)
    axes[0, 0].set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
    return fig, axes[0]


def _whiskers(
    config: Config,
    ax,
    frame: pl.DataFrame,
    low: str,
    high: str,
    width: float,
    middle: str,
    marker: str = "o",
) -> None:
    palette = colours(config)
    for y, row in enumerate(frame.iter_rows(named=True)):
        colour = palette[row["arm"]]
        if np.isfinite(row[low]):
            ax.plot([row[low], row[high]], [y, y], color=colour, lw=width, solid_capstyle="butt")
        ax.plot(row[middle], y, marker, color=colour, ms=5 if marker == "o" else 9)
    ax.xaxis.set_major_locator(MaxNLocator(4))


def _band(frame: pl.DataFrame, column: str):
    """Steps, mean over seeds, and 95 % interval per step; a diverged run counts as 0."""
    grouped = (
        frame.with_columns(pl.col(column).fill_nan(0.0)).group_by("step").agg(column).sort("step")
    )
    bands = [mean_interval(np.array(x)) for x in grouped[column]]
    return grouped["step"], *np.array(bands).T


def _quartiles(frame: pl.DataFrame, column: str):
    """First quartile, median, third quartile over seeds of |column|, by step."""
    x = pl.col(column).fill_nan(None).abs().clip(lower_bound=TINY)
    grouped = frame.group_by("step").agg(
        x.quantile(0.25).alias("low"), x.median().alias("mid"), x.quantile(0.75).alias("high")
    )
    grouped = grouped.sort("step")
    return grouped["low"], grouped["mid"], grouped["high"]
