"""Files of a token log: one a step, whole or absent."""

from __future__ import annotations

import glob
import hashlib
import json
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import polars as pl

from simlab.study.files import write
from simlab.token_log.schema import VERSION, Run, check
from simlab.token_log.tables import KINDS, PACKED, kind_of, refuse


class Log(NamedTuple):
    rows: pl.DataFrame
    run: Run


# ---------------------------------------------------------------- files
def write_step(folder: Path, step: int, rows: pl.DataFrame, run: Run) -> Path:
    """Write the rows of a step, whole or not at all, and return the path; an older file is replaced.

    Raises ValueError for rows that `check` refuses or that are of another step, OSError when the
    file cannot be written.
    """
    path = Path(folder) / f"step_{step:08d}.parquet"
    check(rows, str(path))
    if (rows["step"] != step).any():
        raise ValueError(
            f"{path}: holds rows of step {rows['step'].filter(rows['step'] != step)[0]}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, lambda part: rows.write_parquet(part, metadata=run.metadata()))
    return path


def steps(folder: Path) -> list[Path]:
    """Files of a log in the order of their steps. Raises ValueError if there are none."""
    if found := sorted(Path(folder).glob("step_*.parquet")):
        return found
    raise ValueError(f"{folder}: holds no step_*.parquet of a token log")


def members(path: Path | str) -> list[Path]:
    """Files of a log in the order of their names: of a file itself, of a folder at any depth, of a glob.

    A folder's files that begin with _ or . or end in _metadata are none of its log.
    Raises ValueError in one sentence if there are none, or several kinds.
    """
    file = Path(path)
    if file.is_dir():
        inside = sorted(x for x in file.rglob("*") if kind_of(x) and x.is_file())
        own = [
            x for x in inside if not x.name.startswith(("_", ".")) and "_metadata." not in x.name
        ]
        kinds = sorted({kind for x in own if (kind := kind_of(x))})
        if not own:
            refuse(
                path, f"holds no file of a log ({', '.join(KINDS)}, or with {', '.join(PACKED)})"
            )
        if len(kinds) > 1:
            refuse(
                path, f"holds {' and '.join(kinds)} files; choose by a glob, such as *{kinds[0]}"
            )
        return own
    if glob.has_magic(str(path)) and not file.exists():
        if matches := sorted(Path(x) for x in glob.glob(str(path), recursive=True)):
            return [own for x in matches for own in members(x)]
        refuse(path, "no file matches")
    return [file]


def digests(path: Path | str) -> list[str]:
    """SHA-256 of each file of a log: its content, whatever the names. Raises ValueError, OSError."""
    stats = [(x, x.stat()) for x in members(path)]
    return [_digest(x, stat.st_mtime_ns, stat.st_size) for x, stat in stats]


@lru_cache(maxsize=4096)
def _digest(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path) -> Log:
    """Rows and settings of one file.

    Raises ValueError in one sentence that names the file and, where it applies, row and column.
    """
    try:
        rows, metadata = pl.read_parquet(path), pl.read_parquet_metadata(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{path}: cannot be read ({first})") from error
    settings = {}
    for name in ("token_log", *(f.name for f in fields(Run))):
        if name not in metadata:
            if name == "sampling":  # nothing else was done
                continue
            raise ValueError(f"{path}: metadata {name} is missing")
        try:
            settings[name] = json.loads(metadata[name])
        except ValueError as error:
            raise ValueError(f"{path}: metadata {name} is {metadata[name]!r}, not JSON") from error
    if (version := settings.pop("token_log")) != VERSION:
        raise ValueError(f"{path}: is a token log of version {version}, this reads {VERSION}")
    check(rows, str(path))
    try:
        return Log(rows, Run(**settings))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: metadata {error}") from error
