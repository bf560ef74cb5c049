"""Run every claim of theory/ and the bias study, and write claims.json, figures and report.html."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from simlab.bias import study
from simlab.page import embed, write, write_page
from simlab.theory_figures import FIGURES, STEPS, tightness, trajectories
from theory.claims import CLAIMS
from theory.search import Found, attack, read_instance

DISTRIBUTIONS = {"mu", "pi", "p"}  # fields of instances
TRIES = 2000  # random instances per claim, and steps of the search per inequality
COLUMNS = ["arm", "lag", "J", "remainder", "penalty_mean", "penalty_max"]  # read of a run
ROUNDING = 1e-9  # of the parts of a bias, relative to |grad J|


def verify(
    out: Path,
    budget: float = 1.0,
    seed: int = 0,
    runs: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Found]:
    """Attack every claim with `budget` x 2,000 tries a side; write the folder; return what was found.

    `runs` is a run folder of `simlab compare`, whose logged exact values join the report. Raises
    OSError if the folder cannot be written.
    """
    rows = None if runs is None else read_runs(runs)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    total, found = len(CLAIMS) + 1 + len(FIGURES) + (runs is not None), []
    for number, claim in CLAIMS.items():
        progress(len(found), total, f"claim {number}")
        found.append(attack(claim, max(int(TRIES * budget), 1), seed))
    progress(len(found), total, "claim 12")
    biases = study(seeds=min(max(int(8 * budget), 2), 8))
    worst = max(row["sum_error"] for row in biases)
    tried, broken = len(biases), sum(row["sum_error"] > ROUNDING for row in biases)
    found.append(Found(12, "Bias of each stabilizer", tried, broken, worst_error=worst))
    found.sort(key=lambda f: f.claim)
    draw = dict(FIGURES)
    draw["tightness"] = partial(tightness, max(int(STEPS * budget), 5)), FIGURES["tightness"][1]
    if rows is not None:
        draw["trajectories"] = partial(trajectories, rows), "The bound along training runs"
    pictures = []
    for name, (figure, title) in draw.items():
        progress(len(found) + len(pictures), total, name)
        guide = getattr(figure, "func", figure).__doc__
        pictures.append(embed(figure(), out / "figures", name, title, guide))
    data = {"seed": seed, "budget": budget, "claims": [asdict(f) for f in found], "bias": biases}
    write(out / "claims.json", lambda part: part.write_text(json.dumps(data, indent=1) + "\n"))
    statements = {
        n: (c.STATEMENT, c.__doc__.split("\n", 1)[1].strip("\n")) for n, c in CLAIMS.items()
    }
    values = {"found": found, "statements": statements, "biases": biases, "pictures": pictures}
    write_page(out / "report.html", "verify.html", **values)
    progress(total, total, "done")
    return found


def read_runs(folder: Path) -> pl.DataFrame:
    """Logged rows of a run of `simlab compare`. Raises ValueError if there are none."""
    path = folder / "results.parquet"
    try:
        return pl.read_parquet(path, columns=COLUMNS)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _distribution(what: str, value) -> None:
    """Raises ValueError unless each row is a distribution."""
    for x in value if isinstance(value, list) else [value]:
        x = np.asarray(x, float)
        if not ((x >= 0).all() and np.allclose(x.sum(-1), 1, rtol=0, atol=1e-6)):
            raise ValueError(f"{what} has a row that is no distribution: not >= 0 with sum 1")


def check(number: int, instance: Path) -> list[str]:
    """One claim at one instance: a line per side, the violated ones marked. Raises ValueError."""
    if number not in CLAIMS:
        raise ValueError(
            f"no claim {number} takes an instance; there are {', '.join(map(str, CLAIMS))}"
        )
    try:
        held = read_instance(instance)
        for name in DISTRIBUTIONS & held.keys():
            _distribution(f"{instance}: {name}", held[name])
        sides = CLAIMS[number].sides(held)
    except (KeyError, TypeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{instance}: is not an instance of claim {number} ({error})") from error
    return [
        f"{'VIOLATED' if s.violated else 'holds':8}  {s.name}: {s.lhs:.12g} {'=' if s.equal else '<='} {s.rhs:.12g}"
        for s in sides
    ]
