"""Which corrections were separated from PPO in the studies nearest to a regime: mean |d| and lag.

A study is a folder with a summary.csv, as `simlab compare` and `scaleup compare` write them. A cell is one lag
(and replay) of a study; its regime is the reference's own d_bar and that lag. Distances are factors.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import polars as pl

from simlab.stabilizers import NAMES

FACTOR = 4.0  # in d_bar or lag, beyond which a study is called far
GROUPS = ("lag", "replay")
VERDICTS = ("risk", "level", "verdict")  # the last of tables that have one only
SIDES = {"fails less", "fails more", "above", "below"}
SILENT = {"not separated", "too few lived"}


def lookup(folder: Path, d_bar: float, lag: float, most: int = 3) -> dict:
    """The nearest cells, `most` of them, each of another study, nearest first; and what was left out.

    Raises ValueError if there are no studies.
    """
    cells, left_out = [], []
    for path in sorted(folder.rglob("summary.csv")):
        run = path.parent.relative_to(folder).as_posix()
        try:
            mine = _cells(run, path)
        except (pl.exceptions.PolarsError, OSError, KeyError) as error:
            left_out.append(f"{run} cannot be read ({str(error).splitlines()[0]})")
            continue
        if not mine:
            left_out.append(f"{run} has no reference with a lag and a d_bar")
        elif _learning_rate(path.parent) == 0:
            left_out.append(f"{run} has learning rate 0: nothing was trained")
        else:
            for cell in mine:
                cell["factor_d_bar"] = _factor(cell["d_bar"], d_bar)
                cell["factor_lag"] = _factor(1 + cell["lag"], 1 + lag)
            cells.append(min(mine, key=_distance))
    if not cells and not left_out:
        raise ValueError(f"{folder}: holds no summary.csv of a study; name the folder by --reports")
    near = sorted(cells, key=_distance)
    left_out += [
        f"{x['run']}, lag {x['lag']:g} and mean |d| {x['d_bar']:.3g}, is farther"
        for x in near[most:]
    ]
    near = near[:most]
    for cell in near:
        cell["far"] = max(cell["factor_d_bar"], cell["factor_lag"]) > FACTOR
    known = {
        row["method"] for x in near for key in ("separated", "not_separated") for row in x[key]
    }
    return {
        "d_bar": d_bar,
        "lag": lag,
        "reports": str(folder),
        "cells": near,
        "no_data": [x for x in NAMES if x not in known],
        "left_out": left_out,
    }


def of_audit(result: dict[str, Any]) -> tuple[float | None, float | None]:
    """Mean |d| and mean age in an audit.json, None where it has none."""
    numbers = result.get("mismatch", {})
    return numbers.get("d_bar"), numbers.get("age")


def _cells(run: str, path: Path) -> list[dict]:
    table = pl.read_csv(path, infer_schema_length=None)
    verdicts = [x for x in VERDICTS if x in table.columns]
    groups = [x for x in GROUPS if x in table.columns]
    cells = []
    for _, rows in table.group_by(groups, maintain_order=True):
        lag = _lag(str(rows["lag"][0]))
        own = rows.filter(pl.any_horizontal(pl.col(x) == "reference" for x in verdicts))
        if lag is None or not len(own) or not own["d_bar"][0]:
            continue
        own = own.row(0, named=True)
        cell = {
            "run": run,
            "at": ", ".join(f"{x} {own[x]}" for x in groups),
            "lag": lag,
            "d_bar": float(own["d_bar"]),
            "seeds": own["seeds"],
            "reference": own["arm"],
            "separated": [],
            "not_separated": [],
        }
        for row in rows.iter_rows(named=True):
            said = [row[x] for x in verdicts if row[x] != "reference"]
            if row["arm"] == own["arm"] or row["arm"].startswith("placebo") or not said:
                continue
            sides = [x for x in said if x in SIDES]
            key = "separated" if sides else "not_separated"
            cell[key].append({
                "arm": row["arm"], "method": row["method"], "verdict": ", ".join(sides or [x for x in said if x in SILENT][-1:]),
                **{x: row.get(x) for x in ("typical", "typical_low", "typical_high", "failed", "commit") if x in row},
            })  # fmt: skip
        cells.append(cell)
    return cells


def _lag(text: str) -> float | None:
    """The first number of a lag, such as that of fully_async:max_age=6; None without one."""
    found = re.search(r"\d+(\.\d+)?", text)
    return 0.0 if text == "sync" else float(found[0]) if found else None


def _learning_rate(folder: Path) -> float | None:
    for name in ("config.toml", "recipe.toml"):
        if (folder / name).exists():
            settings = tomllib.loads((folder / name).read_text(encoding="utf-8"))
            return settings.get("training", {}).get("lr")
    return None


def _factor(x: float, y: float) -> float:
    return max(x, y) / min(x, y)


def _distance(cell: dict) -> float:
    return math.log(cell["factor_d_bar"]) + math.log(cell["factor_lag"])
