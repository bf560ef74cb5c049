"""One style for every figure of every report: matplotlib's defaults, colours and dashes of arms, panels, labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.figure import Figure

from simlab.study.settings import Comparison

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "simlab",
}

REFERENCE, PLACEBO = "black", "0.55"  # a contrast of 3.4 on white
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[str | tuple, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
TINY = 1e-6  # the floor of logarithmic axes
ROW = len(OKABE_ITO)  # arms in one panel, besides reference and placebos


@contextmanager
def style() -> Iterator[None]:
    """Within it figures have STYLE over matplotlib's own defaults, whatever the user has set (LaTeX
    text, fonts); afterwards the user's settings are back. The backend is never touched."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # pyright: ignore[reportCallIssue, reportArgumentType]
        yield


def colours(config: Comparison) -> dict[str, str]:
    """One colour per arm, the same in every figure; the reference black, placebos grey."""
    own = own_arms(config)
    table = {label: OKABE_ITO[i % ROW] for i, label in enumerate(own)}
    return {a.label: table.get(a.label, PLACEBO) for a in config.arms} | {
        config.reference: REFERENCE
    }


def dashes(config: Comparison) -> dict[str, str | tuple]:
    """One dash pattern per arm, so that no arm is told by its colour alone; the reference is solid."""
    own = own_arms(config)
    table: dict[str, str | tuple] = {a.label: "-" for a in config.arms}
    return table | {label: DASHES[i % ROW] for i, label in enumerate(own)}


def own_arms(config: Comparison) -> list[str]:
    """Labels of the arms that are neither the reference nor a placebo."""
    return [a.label for a in config.arms if a.label not in (config.reference, *config.placebos)]


def panels(rows: int, columns: int, width: float, height: float, sharey: bool = False):
    """A figure and its axes `[rows, columns]`; sizes in inches a panel."""
    fig = Figure(figsize=(width * columns + 1.2, height * rows))
    return fig, fig.subplots(rows, columns, squeeze=False, sharey=sharey)


def legend(ax) -> None:
    """To the right of the axes, never on the data."""
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def label_ends(ax, ends: dict[str, tuple[float, str]], gap: float = 0.075) -> None:
    """Names of lines at the right edge, at the height of {label: (y of its end, colour)}, pushed apart.

    Call it when the limits are final. `gap` is a line of text as a share of the panel's height.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = {label: to_axes.transform((1, y))[1] for label, (y, _) in ends.items()}
    free = -gap
    spread = []
    for label in sorted(heights, key=heights.__getitem__):
        free = max(heights[label], free + gap)
        spread.append((label, free))
    excess = max(free - 1, 0)
    for i, (label, height) in enumerate(spread):
        room = max(height - excess, i * gap)
        ax.text(
            1.02, room, label, color=ends[label][1], transform=ax.transAxes, va="center", fontsize=8
        )
