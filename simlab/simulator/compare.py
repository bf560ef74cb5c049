"""Run a comparison: cells to workers, finished cells to disk, the run folder at the end.

    <out>/config.toml  results.parquet  runs.parquet  summary.csv  report.html  figures/  cells/

A cell (one arm, one lag, one block of seeds) is written the moment it is done, under a name made of
its settings, of the source of this package and of its own bytes. A stopped run therefore resumes,
changed code never meets old cells, a cell that was cut short or changed is run again, and rerunning
with the same seeds rewrites every file byte for byte.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import polars as pl
import tomli_w

from simlab.simulator.config import Cell, Config
from simlab.simulator.experiments import EXPERIMENTS
from simlab.simulator.pool import Logs, TokenLog, in_pool, in_process
from simlab.simulator.report import write_report
from simlab.simulator.summary import runs, summarize
from simlab.study.arms import cannot_act
from simlab.study.files import ROOT, commit, sources, write
from simlab.study.folder import check_same, claimed, flat
from simlab.study.settings import RunError
from simlab.token_log.files import read

FILES = (
    "config.toml",
    "results.parquet",
    "runs.parquet",
    "summary.csv",
    "map.csv",
    "report.html",
    "figures",
    "cells",
)
# These may change in a folder that has results: finished cells are reused and kept, and the tables,
# the figures and the report are written anew for the methods, lags and seeds of the latest call.
GROWS = ("methods", "method_file", "lags", "seeds", "reference", "draws", "healthy_lag", "sweep")


def compare(
    config: Config,
    experiment: str,
    out: Path,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    token_log: Path | None = None,
) -> pl.DataFrame:
    """Run what is missing, write the run folder, return the summary table.

    `progress(done, total)` hears of every finished cell. In `token_log`, if given, every cell that is
    run writes its token log, in a folder of its own. Raises RunError for a folder that cannot be
    written or holds another run, KeyboardInterrupt after a stop (finished cells are kept).
    """
    provenance = {"version": version("simlab"), "commit": commit()}
    code = source_digest()
    try:
        places = [
            (cell.key(code), cell, point)
            for point, settings in config.points
            for cell in settings.cells()
        ]
    except OSError as error:
        raise RunError(f"{error.filename}: cannot be read ({error.strerror or error})") from error
    cells = {key: cell for key, cell, _ in places}  # a cell that two points share is run once
    settings = {"experiment": experiment} | config.model_dump(mode="json", exclude_none=True)
    with claimed(out, FILES):
        check_same(out / "config.toml", settings, GROWS)
        try:
            frames = finished(out / "cells", cells)
            missing = {key: cell for key, cell in cells.items() if key not in frames}
            if token_log is not None and config.sweep:
                raise RunError("--token-log takes one point, not a sweep; run the point by itself")
            logs = {} if token_log is None else open_logs(token_log, missing, provenance)
            if token_log is not None and frames:
                print(
                    f"{len(frames)} of {len(cells)} cells were finished already and write "
                    "no token log; another --out runs and logs all of them",
                    file=sys.stderr,
                )
            for said in filter(None, (cannot_act(arm, config.training) for arm in config.arms)):
                print(said, file=sys.stderr)
            (out / "cells").mkdir(exist_ok=True)
            write(out / "config.toml", lambda part: part.write_text(tomli_w.dumps(settings)))
            frames |= _run_missing(missing, len(cells), out / "cells", workers, progress, logs)
            return _write_tables(out, config, experiment, provenance, places, frames)
        except OSError as error:
            raise RunError(f"{out}: cannot be written ({error.strerror or error})") from error


def _write_tables(
    out: Path,
    config: Config,
    experiment: str,
    provenance: dict[str, str],
    places: list[tuple[str, Cell, dict[str, object]]],
    frames: dict[str, pl.DataFrame],
) -> pl.DataFrame:
    """Tables, figures and report of all cells; returns the summary table."""
    changed = changes(config, experiment)
    name = f"{experiment}-v{EXPERIMENTS[experiment].VERSION}" + ("-changed" if changed else "")
    parts = []
    for key, cell, point in places:
        constant = {"experiment": name} | provenance | {"config": key, "arm": cell.arm.label}
        constant |= {"method": cell.arm.name, "arguments": str(dict(cell.arm.arguments))}
        constant |= {"lag": cell.lag} | point
        columns = [pl.lit(value).alias(name) for name, value in constant.items()]
        parts.append(frames[key].select(*columns, pl.all()))
    rows = pl.concat(parts, how="diagonal_relaxed")
    per_run = runs(config, rows)
    table = summarize(config, per_run)
    write(out / "results.parquet", rows.write_parquet)
    write(out / "runs.parquet", per_run.write_parquet)
    write(out / "summary.csv", table.write_csv)
    write_report(out, config, EXPERIMENTS[experiment].QUESTION, name, changed, rows, per_run, table)
    return table


def changes(config: Config, experiment: str) -> dict[str, object]:
    """Settings that differ from the experiment's own, by dotted name."""
    own, mine = (flat(c.model_dump()) for c in (Config(**EXPERIMENTS[experiment].SETTINGS), config))
    return {name: value for name, value in mine.items() if value != own[name]}


def source_digest() -> str:
    """A digest of every source file that a cell's numbers depend on: what `train` imports, at any depth."""
    digest = hashlib.sha256()
    for path in sources("simlab.simulator.train"):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def finished(folder: Path, cells: dict[str, Cell]) -> dict[str, pl.DataFrame]:
    """Rows of the cells that are there and whole, by key.

    A file whose bytes are not those that its name tells of is removed, with a word on stderr.
    """
    tables, damaged = {}, []
    for path in sorted(folder.glob("*.parquet")):
        key, _, digest = path.stem.partition("-")
        if key in cells:
            data = path.read_bytes()
            if _digest(data) == digest:
                tables[key] = pl.read_parquet(BytesIO(data))
            else:
                damaged.append(path)
                path.unlink()
    if damaged:
        print(
            f"{damaged[0]}: does not hold what was written; {len(damaged)} such "
            f"{'cell is' if len(damaged) == 1 else 'cells are'} run again",
            file=sys.stderr,
        )
    return tables


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def open_logs(folder: Path, cells: dict[str, Cell], provenance: dict[str, str]) -> Logs:
    """The token logs of these cells, by key; creates the folder.

    Raises RunError if it cannot be written, or if the log of another run lies where one would.
    """
    logs = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror or error})") from error
    for key, cell in cells.items():
        training, place = cell.training, folder / log_name(cell)
        notes = {"config": key, "arm": cell.arm.label, "lag": cell.lag, "engine": "simlab"}
        notes["noise"] = " ".join(f"{n.name}{n.arguments or ''}" for n in cell.noise) or "none"
        notes |= {"kl": f"{training.kl_coef} {training.kl}"} if training.kl_coef else {}
        for path in sorted(place.glob("step_*.parquet"))[:1]:
            try:
                logged_key = read(path).run.notes.get("config")
            except ValueError as error:
                raise RunError(str(error)) from error
            if logged_key != key:
                raise RunError(
                    f"{place}: holds the token log of another run; choose another --token-log"
                )
        logs[key] = TokenLog(place, cell, " ".join(provenance.values()), notes)
    return logs


def log_name(cell: Cell) -> str:
    """Folder of a cell in a token log: arm, lag and seeds, with %XX for what is no file name."""
    words = f"{cell.arm.label}_lag_{cell.lag}_seeds_{cell.seeds[0]}-{cell.seeds[-1]}"
    return quote(words, safe="=,@+")


def _run_missing(
    missing: dict[str, Cell], total: int, folder: Path, workers: int, progress, logs: Logs
) -> dict[str, pl.DataFrame]:
    """Rows of these cells, by key, each written the moment it is done."""
    frames = {}
    progress(total - len(missing), total)
    run = in_pool if workers > 1 else in_process
    try:
        with closing(run(missing, workers, logs)) as results:
            for key, rows in results:
                frames[key] = pl.DataFrame(rows, infer_schema_length=None)
                frames[key].write_parquet(file := BytesIO())
                data = file.getvalue()
                path = folder / f"{key}-{_digest(data)}.parquet"
                write(path, partial(Path.write_bytes, data=data))
                progress(total - len(missing) + len(frames), total)
    finally:  # a worker that was stopped may leave its part
        for log in logs.values():
            for part in log.folder.glob("*.part"):
                part.unlink(missing_ok=True)
    return frames
