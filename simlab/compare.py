"""Run a comparison: cells to workers, finished cells to disk, the run folder at the end.

    <out>/config.toml  results.parquet  summary.csv  report.html  figures/  cells/

A cell (one arm, one lag, one block of seeds) is written the moment it is done, under a name made of
its settings and of the source of this package. A stopped run therefore resumes, changed code never
meets old cells, and rerunning with the same seeds rewrites every file byte for byte.
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

import polars as pl
import tomli_w

from simlab.config import Cell, Config, RunError
from simlab.experiments import EXPERIMENTS
from simlab.page import commit, write
from simlab.pool import Logs, TokenLog, in_pool, in_process
from simlab.report import write_report
from simlab.summary import summarize
from simlab.token_log import read

# These may change in a folder that has results: finished cells are reused and kept, and the tables,
# the figures and the report are written anew for the methods, lags and seeds of the latest call.
GROWS = ("methods", "method_file", "lags", "seeds", "reference")


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
    changed = changes(config, experiment)
    name = f"{experiment}-v{EXPERIMENTS[experiment].VERSION}" + ("-changed" if changed else "")
    code = source_digest()
    cells = {cell.key(code): cell for cell in config.cells()}
    try:
        _open_folder(out, config, experiment)
        missing = {k: c for k, c in cells.items() if not _finished(out / "cells" / f"{k}.parquet")}
        logs = {} if token_log is None else open_logs(token_log, missing, provenance)
        if token_log is not None and len(missing) < len(cells):
            print(
                f"{len(cells) - len(missing)} of {len(cells)} cells were finished already and write "
                "no token log; another --out runs and logs all of them",
                file=sys.stderr,
            )
        _run_missing(missing, len(cells), out / "cells", workers, progress, logs)
        frames = []
        for key, cell in cells.items():
            constant = (
                {"experiment": name}
                | provenance
                | {"config": key, "arm": cell.arm.label, "method": cell.arm.name}
            )
            constant |= {"arguments": str(dict(cell.arm.arguments)), "lag": cell.lag}
            frame = pl.read_parquet(out / "cells" / f"{key}.parquet")
            frames.append(
                frame.select(*[pl.lit(v).alias(k) for k, v in constant.items()], pl.all())
            )
        rows = pl.concat(frames, how="diagonal")
        table = summarize(config, rows)
        write(out / "results.parquet", rows.write_parquet)
        write(out / "summary.csv", table.write_csv)
        write_report(out, config, EXPERIMENTS[experiment].QUESTION, name, changed, rows, table)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from error
    return table


def changes(config: Config, experiment: str) -> dict[str, object]:
    """Settings that differ from the experiment's own, by dotted name."""
    own, mine = (
        _flat(c.model_dump()) for c in (Config(**EXPERIMENTS[experiment].SETTINGS), config)
    )
    return {name: value for name, value in mine.items() if value != own[name]}


def _flat(table: dict, prefix: str = "") -> dict[str, object]:
    out = {}
    for name, value in table.items():
        out |= _flat(value, f"{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


# Files that only choose, summarise or draw: changing them leaves finished cells valid.
LATER = "__main__ batches bias compare contract fused figures intervals methods page pool report summary theory_figures token_log token_rows verify"
AFTERWARDS = {f"{module}.py" for module in LATER.split()}


def source_digest() -> str:
    """A digest of every source file that a cell's numbers depend on."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.name not in AFTERWARDS:
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _open_folder(out: Path, config: Config, experiment: str) -> None:
    """Create the folder and write config.toml; refuse a folder whose run has other settings."""
    wanted = {"experiment": experiment} | config.model_dump(mode="json", exclude_none=True)
    path = out / "config.toml"
    if path.exists():
        try:
            held = tomllib.loads(path.read_text())
        except ValueError as error:
            raise RunError(f"{path}: is not a run's config ({error})") from error
        for name in sorted((wanted.keys() | held.keys()) - set(GROWS)):
            if wanted.get(name) != held.get(name):
                raise RunError(f"{out}: holds a run with another {name}; choose another --out")
    (out / "cells").mkdir(parents=True, exist_ok=True)
    write(path, lambda part: part.write_text(tomli_w.dumps(wanted)))


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
        how, place = cell.training, folder / log_name(cell)
        notes = {"config": key, "arm": cell.arm.label, "lag": cell.lag, "engine": "simlab"}
        notes["noise"] = " ".join(f"{n.name}{n.arguments or ''}" for n in cell.noise) or "none"
        notes |= {"kl": f"{how.kl_coef} {how.kl}"} if how.kl_coef else {}
        for path in sorted(place.glob("step_*.parquet"))[:1]:
            try:
                held = read(path).run.notes.get("config")
            except ValueError as error:
                raise RunError(str(error)) from error
            if held != key:
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
) -> None:
    done = total - len(missing)
    progress(done, total)
    run = in_pool if workers > 1 else in_process
    try:
        with closing(run(missing, workers, logs)) as results:
            for key, rows in results:
                frame = pl.DataFrame(rows, infer_schema_length=None)
                write(folder / f"{key}.parquet", frame.write_parquet)
                done += 1
                progress(done, total)
    finally:  # a writer that a signal stopped may leave its part
        for place in (folder, *(log.folder for log in logs.values())):
            for part in place.glob("*.part"):
                part.unlink(missing_ok=True)


def _finished(path: Path) -> bool:
    """Whether a cell is there and whole."""
    try:
        return path.exists() and pl.read_parquet_schema(path) is not None
    except pl.exceptions.PolarsError:
        return False
