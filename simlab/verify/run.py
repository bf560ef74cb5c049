"""Run every claim of theory/ and the bias study, and write claims.json, figures and report.html."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from simlab.study.files import write
from simlab.study.folder import claimed
from simlab.study.page import embed, write_page
from simlab.verify.bias import sides as bias_sides
from simlab.verify.bias import study
from simlab.verify.claims import CLAIMS, ON_LOSSES
from simlab.verify.figures import FIGURES, STEPS, tightness, trajectories
from simlab.verify.formulas import mathml
from simlab.verify.mutants import table
from simlab.verify.own import load
from theory.search import Claim, Found, attack, check_shapes, read_instance

FILES = ("claims.json", "report.html", "figures", "counterexample-*.json")
DISTRIBUTIONS = {"mu", "pi", "p"}  # fields of instances
TRIES = 2000  # random instances per claim, and steps of the search per inequality
COLUMNS = ["arm", "lag", "J", "remainder", "penalty_mean", "penalty_max"]  # read of a run


def verify(
    out: Path,
    budget: float = 1.0,
    seed: int = 0,
    runs: Path | None = None,
    own: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Found]:
    """Attack every claim with `budget` x 2,000 tries a side; write the folder; return what was found.

    Claims on losses get a quarter of it: a batch of tensors takes ten times as long as a table. `own` is a
    file with a claim, which is then the only one. `runs` is a run folder of `simlab compare`, whose logged exact values join the report. Raises
    RunError for a folder of something else, or in which another command works, OSError if it cannot
    be written.
    """
    rows = None if runs is None else read_runs(runs)
    claim = None if own is None else load(own)
    with claimed(out, FILES):
        (out / "figures").mkdir(exist_ok=True)
        if claim is None:
            return _verify(out, budget, seed, rows, progress)
        progress(0, 1, f"claim {claim.NUMBER}")
        results = [attack(claim, max(int(TRIES * budget), 1), seed)]
        save(out, {"seed": seed, "budget": budget}, results, {claim.NUMBER: claim})
        progress(1, 1, "done")
        return results


def _verify(
    out: Path, budget: float, seed: int, rows: pl.DataFrame | None, progress
) -> list[Found]:
    total, results = len(CLAIMS) + 2 + len(FIGURES) + (rows is not None), []
    for number, claim in CLAIMS.items():
        progress(len(results), total, f"claim {number}")
        tries = int(TRIES * budget) // (4 if claim in ON_LOSSES else 1)
        results.append(attack(claim, max(tries, 1), seed))
    progress(len(results), total, "claim 12")
    biases = study(seeds=min(max(int(8 * budget), 2), 8))
    sides = bias_sides(biases, seed)
    broken, largest = [side.name for side in sides if side.violated], sides[0].lhs
    results.append(
        Found(12, "Bias of each stabilizer", len(sides), len(broken), worst_error=largest)
    )
    results.sort(key=lambda f: f.claim)
    progress(len(results), total, "mutants")
    mutants = table(max(int(TRIES * budget) // 10, 20), seed)
    draw = dict(FIGURES)
    draw["tightness"] = partial(tightness, max(int(STEPS * budget), 5)), FIGURES["tightness"][1]
    if rows is not None:
        draw["trajectories"] = partial(trajectories, rows), "The bound along training runs"
    pictures = []
    for name, (figure, title) in draw.items():
        progress(len(results) + 1 + len(pictures), total, name)
        guide = getattr(figure, "func", figure).__doc__
        pictures.append(embed(figure, out / "figures", name, title, guide))
    head = {"seed": seed, "budget": budget, "violated sides of claim 12": broken}
    save(out, head, results, CLAIMS, pictures=pictures, bias=biases, mutants=mutants)
    progress(total, total, "done")
    return results


def save(
    out: Path, head: dict, results: list[Found], claims: Mapping[int, Claim], pictures=(), **tables
) -> None:
    """claims.json and report.html; `tables` are lists of rows, by name."""
    data = head | {"claims": [asdict(f) for f in results]} | tables
    write(out / "claims.json", lambda part: part.write_text(json.dumps(data, indent=1) + "\n"))
    statements = {
        n: (mathml(c.STATEMENT), (c.__doc__ or "").partition("\n")[2].strip("\n"))
        for n, c in claims.items()
    }
    values = {"found": results, "statements": statements, "pictures": pictures, **tables}
    write_page(out / "report.html", Path(__file__).parent / "report.html", **values)


def read_runs(folder: Path) -> pl.DataFrame:
    """Logged rows of a run of `simlab compare`. Raises ValueError if there are none."""
    path = folder / "results.parquet"
    try:
        return pl.read_parquet(path, columns=COLUMNS, glob=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _distribution(what: str, value) -> None:
    """Raises ValueError unless each row is a distribution."""
    for x in value if isinstance(value, list) else [value]:
        x = np.asarray(x, float)
        if not ((x >= 0).all() and np.allclose(x.sum(-1), 1, rtol=0, atol=1e-6)):
            raise ValueError(f"{what} has a row that is no distribution: not >= 0 with sum 1")


def check(number: int, instance: Path, own: Path | None = None) -> list[str]:
    """One claim, of the project or of the file `own`, at one instance: a line per side, the violated ones
    marked. Raises ValueError."""
    claims = CLAIMS
    if own is not None:
        claim = load(own)
        claims = {claim.NUMBER: claim}
    if number not in claims:
        raise ValueError(
            f"no claim {number} takes an instance; there are {', '.join(map(str, claims))}"
        )
    arrays = read_instance(instance)
    try:
        check_shapes(claims[number], arrays)
        for name in sorted(DISTRIBUTIONS & arrays.keys()):
            _distribution(name, arrays[name])
        with np.errstate(all="ignore"):  # a NaN is reported, as a violation
            sides = claims[number].sides(arrays)
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{instance}: is not an instance of claim {number} ({error})") from error
    return [
        f"{'VIOLATED' if s.violated else 'holds':8}  {s.name}: {s.lhs:.12g} {'=' if s.equal else '<='} {s.rhs:.12g}"
        for s in sides
    ]
