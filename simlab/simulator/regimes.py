"""The regime map of a sweep: along its first axis, where is an arm stable and what does it reach?

- an arm is stable at a value of the axis if at most a tenth of its runs failed there (study/verdicts.py);
- its stable range is the longest unbroken stretch of such values; `stable` counts them, with a 95 %
  interval from resampled seeds. A range that meets an end of the axis may go on beyond it;
- best = final J at the arm's best value, which is chosen on one half of the seeds and read off the
  other, both ways: the best of several values is otherwise too good;
- fail_tuned = share of runs that failed at the reference's best value where it is healthy, which is
  what a setting tuned without lag and kept meets.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from simlab.simulator.config import Config
from simlab.study.findings import untrained
from simlab.study.intervals import columns, mean_interval, share_interval
from simlab.study.style import TINY, colours, panels

STABLE = 0.1
RESAMPLES = 1000


def regimes(config: Config, runs: pl.DataFrame) -> pl.DataFrame:
    """One row for each arm, lag and value of the second axis, from the `runs` of a sweep."""
    rng = np.random.default_rng(0)
    axis, values = next(iter(config.axes.items()))
    names = [name for name in config.groups if name != axis]
    tuned = _tuned(config, runs, axis)
    table = []
    for arm in config.arms:
        for group in product(*(config.groups[name] for name in names)):
            here = dict(zip(names, group, strict=True))
            mine = runs.filter(
                pl.col("arm") == arm.label, *[pl.col(k) == v for k, v in here.items()]
            ).sort("seed")
            frames = [mine.filter(pl.col(axis) == value) for value in values]
            final = np.stack([frame["final"].to_numpy() for frame in frames], 1)  # [seeds, values]
            failed = np.stack([frame["failed"].to_numpy() for frame in frames], 1)
            low, n = stretch(failed.mean(0) <= STABLE)
            picks = rng.integers(len(failed), size=(RESAMPLES, len(failed)))
            counts = [stretch(x <= STABLE)[1] for x in failed[picks].mean(1)]
            row = (
                {"arm": arm.label, "method": arm.name} | here | {"axis": axis, "seeds": len(final)}
            )
            row |= {"stable": n, "stable_count_low": int(np.quantile(counts, 0.025))}
            row |= {"stable_count_high": int(np.quantile(counts, 0.975))}
            row |= {"stable_low": values[low] if n else None}
            row |= {"stable_high": values[low + n - 1] if n else None}
            row |= {"best_at": values[int(final.mean(0).argmax())]}
            row |= columns("best", mean_interval(crossed(final)))
            there = failed[:, values.index(tuned)]
            row |= {"tuned": tuned} | columns(
                "fail_tuned", share_interval(int(there.sum()), len(there))
            )
            table.append(row)
    return pl.DataFrame(table, infer_schema_length=None)


def of_folder(config: Config, out: Path) -> pl.DataFrame:
    """`regimes` of a run folder."""
    return regimes(config, pl.read_parquet(out / "runs.parquet"))


def _tuned(config: Config, runs: pl.DataFrame, axis: str) -> object:
    """The value of the axis at which the reference does best where it is healthy."""
    healthy = runs.filter(pl.col("arm") == config.reference, pl.col("lag") == config.healthy)
    means = healthy.group_by(axis, maintain_order=True).agg(pl.col("final").mean())
    return means.sort("final", descending=True, maintain_order=True)[axis][0]


def stretch(stable: np.ndarray) -> tuple[int, int]:
    """(first, length) of the longest unbroken run of True; the first of equals, (0, 0) without any."""
    best, start = (0, 0), 0
    for i, ok in enumerate([*stable, False]):
        if not ok:
            if i - start > best[1]:
                best = start, i - start
            start = i + 1
    return best


def crossed(final: np.ndarray) -> np.ndarray:
    """`final` `[seeds, values]` at the value that is best for the seeds of the other half: `[seeds]`."""
    half = np.arange(len(final)) % 2 == 0
    out = np.empty(len(final))
    for mine in (half, ~half):
        other = final[~mine] if (~mine).any() else final
        out[mine] = final[mine, other.mean(0).argmax()] if mine.any() else out[mine]
    return out


def findings(config: Config, table: pl.DataFrame, summary: pl.DataFrame) -> list[str]:
    """Where each arm is stable, in a sentence a group, and what was not trained; arms are not ranked."""
    axis, values = next(iter(config.axes.items()))
    said = untrained(config, summary)
    for group, here in table.group_by(
        *[name for name in config.groups if name != axis], maintain_order=True
    ):
        names = [name for name in config.groups if name != axis]
        where = ", ".join(f"{name} {value}" for name, value in zip(names, group, strict=True))
        parts = [
            f"{row['arm']} {span(row, values)}"
            for row in here.filter(~pl.col("arm").is_in(config.placebos)).iter_rows(named=True)
        ]
        said.append(f"{where.capitalize()}, stable {axis}: {'; '.join(parts)}.")
    return said


def span(row: dict, values: tuple) -> str:
    """A stable range in words, with "or beyond" where it meets an end of the axis."""
    if not row["stable"]:
        return "nowhere"
    low, high = row["stable_low"], row["stable_high"]
    ends = [("below", low == values[0]), ("above", high == values[-1])]
    beyond = " and ".join(word for word, meets in ends if meets)
    return (f"{low:g} to {high:g}" if isinstance(low, float | int) else f"{low} to {high}") + (
        f" (or {beyond})" if beyond else ""
    )


def ranges(config: Config, runs: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """The stable range of every arm along the axis, a panel a group; a dot where its mean final is best."""
    palette = colours(config)
    axis, values = next(iter(config.axes.items()))
    places, numeric = _places(values)
    names = [name for name in config.groups if name != axis]
    groups = list(table.group_by(*names, maintain_order=True))
    fig, axes = panels(1, len(groups), 2.5, 0.24 * len(config.arms) + 1.1, sharey=True)
    for ax, (group, here) in zip(axes[0], groups, strict=True):
        for y, row in enumerate(here.iter_rows(named=True)):
            colour = palette[row["arm"]]
            ax.plot(places[row["best_at"]], y, "o", color=colour, ms=4)
            if row["stable"]:
                ends = places[row["stable_low"]], places[row["stable_high"]]
                ax.plot(ends, [y, y], color=colour, lw=5, alpha=0.45, solid_capstyle="round")
                for end, edge, mark in ((ends[0], values[0], "<"), (ends[1], values[-1], ">")):
                    if end == places[edge]:
                        ax.plot(end, y, mark, color=colour, ms=6, markerfacecolor="white")
        ax.set_title(", ".join(f"{n} {v}" for n, v in zip(names, group, strict=True)))
        ax.set_xticks(list(places.values()), [f"{x:g}" if numeric else str(x) for x in values])
    labels = [arm.label for arm in config.arms]
    axes[0, 0].set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
    fig.supxlabel(axis, fontsize=9)
    return fig


def heat(config: Config, runs: pl.DataFrame, table: pl.DataFrame) -> Figure:
    """Median final J over the axis and the groups, a panel an arm; numbers are failed runs."""
    axis, values = next(iter(config.axes.items()))
    names = [name for name in config.groups if name != axis]
    groups = list(product(*(config.groups[name] for name in names)))
    arms = [arm.label for arm in config.arms if arm.label not in config.placebos]
    across = min(len(arms), 4)
    down = -(-len(arms) // across)
    fig, axes = panels(down, across, 0.33 * len(values) + 0.9, 0.3 * len(groups) + 0.8, sharey=True)
    image = None
    for ax, label in zip(axes.flat, arms, strict=False):
        final, failed = (np.zeros((len(groups), len(values))) for _ in range(2))
        for (i, group), (j, value) in product(enumerate(groups), enumerate(values)):
            cell = runs.filter(
                pl.col("arm") == label,
                pl.col(axis) == value,
                *[pl.col(name) == x for name, x in zip(names, group, strict=True)],
            )
            final[i, j], failed[i, j] = cell["final"].median(), cell["failed"].sum()
        image = ax.imshow(
            np.log10(np.maximum(1 - final, TINY)), cmap="cividis_r", vmin=-3, vmax=0, aspect="auto"
        )
        for i, j in np.argwhere(failed > 0):
            dark = final[i, j] < 0.9
            ax.text(
                j, i, f"{failed[i, j]:.0f}", ha="center", va="center", fontsize=7,
                color="white" if dark else "black",
            )  # fmt: skip
        ax.set_title(label, fontsize=9)
        ax.set_xticks(
            range(len(values)),
            [f"{x:g}" if isinstance(x, float | int) else x for x in values],
            fontsize=7,
        )
        ax.set_yticks(
            range(len(groups)), [", ".join(map(str, group)) for group in groups], fontsize=7
        )
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    for ax in axes.flat[len(arms) :]:
        ax.set_axis_off()
    fig.supxlabel(axis, fontsize=9)
    fig.supylabel(", ".join(names), fontsize=9)
    bar = fig.colorbar(image, ax=axes, ticks=[-3, -2, -1, 0], fraction=0.03)
    bar.set_ticklabels(["0.999", "0.99", "0.9", "0"])
    bar.set_label("median final J", fontsize=8)
    return fig


def numbers(values: tuple) -> bool:
    """Whether all are numbers."""
    return all(isinstance(x, float | int) and not isinstance(x, bool) for x in values)


def ordered(config: Config) -> bool:
    """Whether the first axis is one of numbers, along which a range means something."""
    return numbers(next(iter(config.axes.values())))


def _places(values: tuple) -> tuple[dict, bool]:
    """Where values stand on an axis: at their logarithm if all are above 0, else in a row."""
    numeric = numbers(values)
    if numeric and min(values) > 0:
        return {x: float(np.log2(x)) for x in values}, True
    return {x: float(i) for i, x in enumerate(values)}, numeric


GUIDES = {
    "ranges": (
        "Where each method is stable",
        "Bars: the longest unbroken stretch of the axis at which at most a tenth of the runs failed. An "
        "arrow marks a bar that meets the end of the axis and may go on beyond it. Dots: where the arm's mean "
        "final J is largest. Grey arms are further draws of the reference: how far their bars differ is chance.",
    ),
    "heat": (
        "The regime map",
        "Median final J over seeds, on a scale of its distance from 1. Numbers count the runs that failed.",
    ),
}


def figures(config: Config) -> list[tuple[str, Callable[..., Figure], tuple[str, str]]]:
    """Name, function and (title, guide) of each figure of a sweep; over words there are no ranges."""
    drawn = (ranges, heat) if ordered(config) else (heat,)
    return [(draw.__name__, draw, GUIDES[draw.__name__]) for draw in drawn]
