"""`simlab show RUN` and `simlab diff A B`: run folders of `simlab compare` and `scaleup compare` on a terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import polars as pl
import tyro
from rich.console import Console
from rich.table import Table

from simlab.study.command_line import parse
from simlab.study.folder import flat, read_toml
from simlab.study.strict import Strict

SETTINGS = ("config.toml", "recipe.toml")  # of simlab compare, of scaleup compare
COLUMNS = {  # of the table of `show`, those that the folder has
    "failed": "failed",
    "risk": "risk",
    "final": "final",
    "typical": "level, median",
    "level": "level",
    "verdict": "verdict",
    "collapsed": "collapsed",
    "idle": "cuts as PPO %",
}
WORST = 3  # columns of numbers that `diff` shows for an arm's row


class Show(Strict):
    """Print the table of a run folder: a row for every lag and arm, with intervals and verdicts."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run folder of simlab compare or scaleup compare."""
    print_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print every column of summary.csv as a list of JSON records."""


class Diff(Strict):
    """Print which settings, arms and numbers differ between two run folders; exit code 1 if any does."""

    a: Annotated[Path, tyro.conf.Positional]
    """A run folder."""
    b: Annotated[Path, tyro.conf.Positional]
    """Another one."""


def run_show(words: list[str]) -> None:
    """`simlab show`."""
    options = parse(Show, words, "simlab show")
    table = summary(options.run)
    if options.print_json:
        rows = [{k: _plain(x) for k, x in row.items()} for row in table.iter_rows(named=True)]
        print(json.dumps(rows, indent=1, allow_nan=False))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(shown(options.run, table), crop=False)
    if (report := options.run / "report.html").exists():
        console.print(f"report: {report}", highlight=False, soft_wrap=True)


def run_diff(words: list[str]) -> None:
    """`simlab diff`."""
    options = parse(Diff, words, "simlab diff")
    lines = different(options.a, options.b)
    print("\n".join(lines or ["no setting, arm or number differs"]))
    raise SystemExit(int(bool(lines)))


def summary(run: Path) -> pl.DataFrame:
    """summary.csv of a run folder. Raises ValueError in one sentence where there is none."""
    path = run / "summary.csv"
    if not path.is_file():
        raise ValueError(
            f"{run}: has no summary.csv, so it is no finished run folder of simlab compare or "
            "scaleup compare; the command that started it resumes it"
        )
    try:
        table = pl.read_csv(path, infer_schema_length=None)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    if table.columns[:2] != ["arm", "method"] or "seeds" not in table.columns:
        raise ValueError(f"{path}: is no summary of a comparison")
    return table


def settings(run: Path) -> dict[str, object]:
    """The settings of a run folder by dotted name. Raises ValueError in one sentence."""
    path = next((run / name for name in SETTINGS if (run / name).is_file()), None)
    if path is None:
        raise ValueError(f"{run}: has no {' or '.join(SETTINGS)}, so it is no run folder")
    return flat(read_toml(path))


def keys(table: pl.DataFrame) -> list[str]:
    """Columns that say which row it is: those before the number of seeds."""
    return [x for x in table.columns[: table.columns.index("seeds")] if x != "method"]


def shown(run: Path, table: pl.DataFrame) -> Table:
    """The table of `show`, a line between groups."""
    group = [x for x in keys(table) if x != "arm"]
    held = [x for x in COLUMNS if x in table.columns]
    out = Table(title=str(run), title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name in [*group, "arm", *(COLUMNS[x] for x in held)]:
        out.add_column(
            name, justify="right" if name in ("failed", "collapsed") else "left", no_wrap=True
        )
    before = None
    for row in table.iter_rows(named=True):
        here = [str(row[x]) for x in group]
        if before not in (None, here):
            out.add_section()
        named = here if here != before else [""] * len(here)
        before = here
        out.add_row(*named, row["arm"], *(_cell(row, x) for x in held))
    return out


def _cell(row: dict, name: str) -> str:
    x = row[name]
    if x is None or x == "":
        return "-"
    if name in ("failed", "collapsed"):
        return f"{x} of {row['seeds']}"
    if name == "idle":
        return f"{100 * x:.0f}"
    if isinstance(x, float):
        ends = [row.get(f"{name}_{end}") for end in ("low", "high")]
        held = [e for e in ends if e is not None and math.isfinite(e)]
        return f"{x:.3f}" + (f" [{held[0]:.3f}, {held[1]:.3f}]" if len(held) == 2 else "")
    return str(x)


def _plain(x: object) -> object:
    """A number that JSON has, or None."""
    return None if isinstance(x, float) and not math.isfinite(x) else x


def different(a: Path, b: Path) -> list[str]:
    """One line for every setting, arm and row that differs; none for equal folders."""
    one, two = settings(a), settings(b)
    lines = []
    for name in sorted(one.keys() | two.keys()):
        mine, other = one.get(name), two.get(name)
        if mine == other:
            continue
        if isinstance(mine, list) and isinstance(other, list):
            parts = [f"only {a}: {x}" for x in mine if x not in other]
            parts += [f"only {b}: {x}" for x in other if x not in mine]
            lines.append(f"{name}: {'; '.join(parts) or 'in another order'}")
        else:
            said = ["not set" if x is None else repr(x) for x in (mine, other)]
            lines.append(f"{name}: {said[0]} | {said[1]}")
    return lines + numbers(a, summary(a), b, summary(b))


def numbers(a: Path, one: pl.DataFrame, b: Path, two: pl.DataFrame) -> list[str]:
    """Rows of one table only, columns of one only, and the numbers that differ in common rows."""
    lines = [
        f"column {x} only in {a if x in one.columns else b}"
        for x in [*one.columns, *(x for x in two.columns if x not in one.columns)]
        if (x in one.columns) != (x in two.columns)
    ]
    if keys(one) != keys(two):
        return [*lines, "the rows are of other groups and cannot be compared"]
    by = keys(one)
    rows = [
        {tuple(str(row[x]) for x in by): row for row in table.iter_rows(named=True)}
        for table in (one, two)
    ]
    for which, mine, other in ((a, *rows), (b, *rows[::-1])):
        alone: dict[str, list[str]] = {}
        for key in (x for x in mine if x not in other):
            alone.setdefault(_place(by[1:], key[1:]), []).append(key[0])
        lines += [f"only {which}: {place}: {', '.join(arms)}" for place, arms in alone.items()]
    common = [x for x in one.columns if x in two.columns and x not in by]
    for key in (x for x in rows[0] if x in rows[1]):
        pairs = {x: (rows[0][key][x], rows[1][key][x]) for x in common}
        apart = {x: (m, o) for x, (m, o) in pairs.items() if m != o and not (_nan(m) and _nan(o))}
        if apart:
            first = [x for x in COLUMNS if x in apart] or list(apart)
            said = [f"{x} {_short(apart[x][0])} | {_short(apart[x][1])}" for x in first[:WORST]]
            rest = len(apart) - len(said)
            said += [f"{rest} more column{'s' * (rest > 1)}"] * bool(rest)
            lines.append(f"{_place(by, key)}: {', '.join(said)}")
    return lines


def _place(by: list[str], key: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {x}" for name, x in zip(by, key, strict=True))


def _nan(x: object) -> bool:
    return isinstance(x, float) and math.isnan(x)


def _short(x: object) -> str:
    return f"{x:.6g}" if isinstance(x, float) else "-" if x is None else str(x)
