"""The figures of both verdicts and of all finals, of either world: a panel for each group, arms in the order of the settings."""

from __future__ import annotations

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simlab.study.findings import place
from simlab.study.intervals import profile
from simlab.study.settings import Comparison
from simlab.study.style import ROW, TINY, colours, dashes, label_ends, own_arms, panels
from simlab.study.verdicts import groups

WIDE = 20  # an interval this much wider than the typical one puts the axis on a symlog scale


def risk(config: Comparison, table: pl.DataFrame) -> Figure:
    """Share of runs that failed, with its exact 95 % interval; the grey line is the pooled reference."""
    fig, panel = _panels(config, "P(fail)")
    for ax, here in zip(panel, _frames(config, table), strict=True):
        draws = here.filter(pl.col("arm").is_in([config.reference, *config.placebos]))
        failed, seeds = (draws[name].to_numpy().sum() for name in ("failed", "seeds"))
        ax.axvline(failed / seeds, color="0.6", lw=0.8)
        _whiskers(config, ax, here, "fail", "o", 2.4, "risk")
        ax.set_xlim(-0.03, 1.03)
    return fig


def level(config: Comparison, table: pl.DataFrame) -> Figure:
    """Final minus the reference's where neither failed: mean (dot, thick) and median (tick, thin), with
    the intervals that verdicts rest on; filled where there is a verdict."""
    fig, panel = _panels(config, f"final minus {config.reference}'s, where neither failed")
    width = (table["gain_high"] - table["gain_low"]).drop_nulls().to_numpy().astype(float)
    typical = max(float(np.median(width)), TINY) if len(width) else TINY
    flat = bool((width > WIDE * typical).any())
    for ax, here in zip(panel, _frames(config, table), strict=True):
        ax.axvline(0, color="0.4", lw=0.8)
        _whiskers(config, ax, here, "typical", "|", 0.9, "level", below=0.28)
        _whiskers(config, ax, here, "gain", "o", 2.4, "level")
        if flat:
            ax.set_xscale("symlog", linthresh=typical)
            ax.tick_params(axis="x", labelrotation=45, labelsize=7)
    return fig


def profiles(config: Comparison, runs: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """Performance profiles: the share of runs that end above a score; arms with a verdict first."""
    palette, dash = colours(config), dashes(config)
    fig, axes = panels(1, len(groups(config)), 3.3, 2.8, sharey=True)
    for ax, group, here in zip(axes[0], groups(config), _frames(config, table), strict=True):
        said = here.filter(
            pl.col("risk").str.starts_with("fails") | pl.col("level").is_in(["above", "below"])
        )["arm"]
        own = sorted(own_arms(config), key=lambda label: label not in said)[:ROW]
        mine = runs.filter(*[pl.col(name) == value for name, value in group.items()])
        nearest = 1 - mine["final"].to_numpy().max()
        distance = np.geomspace(max(TINY, nearest) / 1.2, 1, 400)
        ends = {}
        for label in [*config.placebos, config.reference, *own]:
            share = profile(mine.filter(pl.col("arm") == label)["final"].to_numpy(), 1 - distance)
            ax.plot(distance, share, color=palette[label], ls=dash[label], lw=1.4)
            if label not in config.placebos:
                ends[label] = np.interp(1 - runs["bar"][0], distance, share), palette[label]
        ax.axvline(1 - runs["bar"][0], color="0.4", ls=":", lw=0.8)
        ax.set(xscale="log", ylim=(-0.03, 1.03), title=place(group).lower())
        ax.set_xlabel("1 - final")
        label_ends(ax, ends)
    axes[0, 0].set_ylabel("share of runs that end nearer to 1")
    return fig


def _panels(config: Comparison, xlabel: str):
    """A panel a group with arms on the y axis, in the order of the settings: never sorted by result."""
    labels, names = [a.label for a in config.arms], groups(config)
    fig, axes = panels(1, len(names), 2.5, 0.24 * len(labels) + 1.1, sharey=True)
    for ax, group in zip(axes[0], names, strict=True):
        ax.set_title(place(group).lower())
        ax.xaxis.set_major_locator(MaxNLocator(4))
    axes[0, 0].set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
    fig.supxlabel(xlabel, fontsize=9)
    return fig, axes[0]


def _frames(config: Comparison, table: pl.DataFrame) -> list[pl.DataFrame]:
    return [
        table.filter(*[pl.col(name) == value for name, value in group.items()])
        for group in groups(config)
    ]


def _whiskers(
    config: Comparison,
    ax,
    frame: pl.DataFrame,
    name: str,
    marker: str,
    width: float,
    verdict: str,
    below: float = 0.0,
) -> None:
    """A mark with its interval for each arm, `below` its line; hollow where nothing is separated."""
    palette = colours(config)
    for y, row in enumerate(frame.iter_rows(named=True)):
        if row[name] is None:
            continue
        colour, low, high = palette[row["arm"]], row[f"{name}_low"], row[f"{name}_high"]
        if np.isfinite(low):
            ax.plot([low, high], [y + below] * 2, color=colour, lw=width, solid_capstyle="butt")
        face = "white" if row[verdict] in ("not separated", "reference") else colour
        size = 5 if marker == "o" else 9
        ax.plot(row[name], y + below, marker, color=colour, markerfacecolor=face, ms=size)
