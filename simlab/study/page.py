"""One self-contained page a report, and its figures in three formats."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import jinja2
import polars as pl
from matplotlib.figure import Figure

from simlab.study.files import write
from simlab.study.settings import Comparison
from simlab.study.style import style
from simlab.study.verdicts import groups

UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
# columns of the table at the end of a page, besides arm and group: which, under what name, as what
INTERVAL, PERCENT, NUMBER = range(3)
VERDICTS = {
    "failed": ("failed", NUMBER),
    "fail": ("P(fail)", INTERVAL),
    "risk_p": ("risk p", NUMBER),
    "risk": ("risk", NUMBER),
    "gain": ("level, mean", INTERVAL),
    "typical": ("level, median", INTERVAL),
    "gain_p": ("level p", NUMBER),
    "level": ("level", NUMBER),
    "final": ("final", INTERVAL),
    "iqm": ("IQM", INTERVAL),
    "improvement": ("P(improvement)", INTERVAL),
    "collapse": ("P(collapse)", INTERVAL),
    "peak": ("peak", NUMBER),
    "idle": ("cuts as PPO, batches %", PERCENT),
}


def embed(
    draw: Callable[[], Figure],
    folder: Path,
    name: str,
    title: str,
    guide: str,
    alt: str | None = None,
) -> dict[str, str]:
    """Draw a figure in the one style and save it as PNG, SVG and PDF, undated; return what the page
    shows of it."""
    files = {suffix: BytesIO() for suffix in UNDATED}
    with style():
        fig = draw()
        fig.draw_without_rendering()  # lays it out, once for the three
        fig.set_layout_engine("none")
        for suffix, file in files.items():
            fig.savefig(file, format=suffix, dpi=130, metadata=UNDATED[suffix])
    for suffix, file in files.items():
        write(folder / f"{name}.{suffix}", partial(Path.write_bytes, data=file.getvalue()))
    picture = base64.b64encode(files["png"].getvalue()).decode()
    return {"name": name, "title": title, "guide": guide, "png": picture, "alt": alt or title}


def write_page(path: Path, template: Path, **values) -> None:
    """Render a template, which may extend page.html of this folder, to a self-contained page."""
    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    html = environment.get_template(template.name).render(**values)
    write(path, lambda part: part.write_text(html, encoding="utf-8"))


def shown(
    config: Comparison,
    table: pl.DataFrame,
    more: Mapping[str, tuple[str, int]],
    downloads: Iterable[str],
) -> dict:
    """What page.html shows of a table: the matrix, every cell, downloads and versions."""
    columns = {"arm": ("arm", NUMBER)} | {name: (name, NUMBER) for name in config.groups}
    columns |= VERDICTS | dict(more)
    return {
        "groups": [", ".join(map(str, group.values())) for group in groups(config)],
        "group_names": ", ".join(config.groups),
        "matrix": matrix(config, table),
        "bar": f"{table['bar'][0]:.3g}",
        "columns": [label for label, _ in columns.values()],
        "table": [
            [_cell(row, name, kind) for name, (_, kind) in columns.items()]
            for row in table.iter_rows(named=True)
        ],
        "downloads": list(downloads),
        "notes": config.notes,
        "versions": ", ".join(f"{x} {version(x)}" for x in ("torch", "numpy", "scipy", "polars")),
    }


def matrix(config: Comparison, table: pl.DataFrame) -> list[dict]:
    """A row an arm, the reference first and its placebos last; a cell a group: failures, level, whether it acted."""
    kinds = {config.reference: "reference"} | dict.fromkeys(config.placebos, "placebo")
    order = {"reference": 0, "": 1, "placebo": 2}
    labels = sorted((a.label for a in config.arms), key=lambda label: order[kinds.get(label, "")])
    rows = []
    for label in labels:
        mine = table.filter(pl.col("arm") == label).iter_rows(named=True)
        cells = [_matrix_cell(row, kinds.get(label, "")) for row in mine]
        rows.append({"arm": label, "kind": kinds.get(label, ""), "cells": cells})
    return rows


def _matrix_cell(row: dict, kind: str) -> dict:
    gain = row.get("typical")
    if row["level"] == "reference":
        level = f"IQM {row['iqm']:.3f}"
    elif gain is None:
        level = "too few lived"
    else:
        level = f"{gain:+.3f}"
    idle = row["idle"] or 0
    mute = "not trained" if row["still"] == 1 else "never acted" * row["same_as_reference"]
    return {
        "failed": f"{row['failed']}/{row['seeds']}",
        "risk": row["risk"],
        "gain": level,
        "level": row["level"],
        "mute": mute,
        "idle": f"cuts as PPO in {100 * idle:.0f} %" if idle >= 0.5 and not kind else "",
    }


def _cell(row: dict, name: str, kind: int) -> tuple[str, str]:
    """Text of a cell, and what it is sorted by."""
    value = row.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-", ""
    if kind == INTERVAL:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        ends = f"{low:.3f}, {high:.3f}" if math.isfinite(low) else "-inf, inf"
        return f"{value:.3f} [{ends}]", repr(value)
    if kind == PERCENT:
        return f"{100 * value:.3g}", repr(value)
    return (f"{value:.3g}" if isinstance(value, float) else str(value)), str(value)
