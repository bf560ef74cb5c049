"""A table out of any file of a log: Parquet, JSON lines or CSV, plain or packed; damage is one sentence.

Only the columns that are asked for are read. JSON lines go through polars; lines that it cannot type
(NaN, booleans beside numbers, damage) are parsed one by one, which is slow and names the line.
"""

from __future__ import annotations

import glob
import gzip
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import polars as pl

from simlab.token_log.entries import ids_column, unpacked
from simlab.token_log.windows import WHOLE, Window

KINDS = (".parquet", ".jsonl", ".ndjson", ".csv", ".json", ".arrow", ".feather", ".pt")
PACKED = (".gz", ".zst")
LONGEST = 200  # characters of a sentence


class Chosen(NamedTuple):
    """Columns to read: numbers that must be there, and others that may hold anything."""

    numbers: list[str]
    others: list[str]


Choose = Callable[[Sequence[str]], Chosen]


class Table(NamedTuple):
    """Rows of one file: the chosen columns, and the names of all there are."""

    rows: pl.DataFrame
    columns: list[str]


def table(path: Path, choose: Choose, window: Window = WHOLE) -> Table:
    """The columns that `choose` picks of the names in a file, in a window of its rows if it is a Parquet file.

    Raises ValueError in one sentence that names the file and, where it applies, line and column.
    """
    kind = kind_of(path)
    if path.suffix in (".pkl", ".pickle"):
        refuse(
            path,
            "is a pickle, which runs code when it is read, so it is never opened: save its columns (SkyRL: action_log_probs, rollout_logprobs, response_mask) as Parquet",
        )
    if kind is None:
        refuse(path, f"a log must be a {', '.join(KINDS)} file, or {_packed()}")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror or error})")
    if not start:
        refuse(path, "cannot be read (it is empty: 0 bytes)")
    if path.suffix in PACKED and kind in (".arrow", ".feather", ".pt"):
        refuse(path, f"unpack it first; a {kind} file is packed inside")
    try:
        if kind == ".parquet":
            rows = pl.scan_parquet(_parquet(path), glob=False)
            return _chosen(rows.slice(*window) if window != WHOLE else rows, choose)
        if kind in (".arrow", ".feather"):
            return _chosen(pl.read_ipc(path).lazy(), choose)
        if kind == ".csv":
            return _chosen(pl.scan_csv(path, infer_schema_length=None, glob=False), choose)
    except (OSError, EOFError, pl.exceptions.PolarsError) as error:
        refuse(path, f"cannot be read ({_first_line(error)})")
    if kind == ".pt":
        return _of_rows(path, _samples(path), choose)
    return _json(path, choose)


def kind_of(path: Path) -> str | None:
    """The ending that says what a file is, without that of a packer; None for another kind."""
    plain = path.with_suffix("") if path.suffix in PACKED else path
    return plain.suffix if plain.suffix in KINDS else None


def place(path: Path, row: int) -> str:
    """Where a row stands: its line in a text, blank lines counted, or its number in a table."""
    kind = kind_of(path)
    if kind not in (".jsonl", ".ndjson", ".csv", ".json"):
        return f"row {row}"
    stat = path.stat()
    lines = _lines(path, stat.st_mtime_ns, stat.st_size)
    if lines is None:
        return f"row {row}"
    return f"line {lines[row + int(kind == '.csv')] + 1}"


@lru_cache(maxsize=4)
def _lines(path: Path, changed: int, size: int) -> np.ndarray | None:
    """Numbers of the lines of a text that are not blank; None if it is one list."""
    lines = pl.read_lines(path, glob=False)["line"].str.strip_chars()
    if kind_of(path) == ".json" and lines.str.starts_with("[").any():
        return None
    return (lines != "").arg_true().to_numpy()


def refuse(path: Path | str, sentence: str, columns: Sequence[str] = ()) -> NoReturn:
    """Raises ValueError: the file, a sentence of at most LONGEST characters, the columns there are."""
    seen = f"; columns: {short(', '.join(columns), LONGEST)}" if columns else ""
    raise ValueError(f"{path}: {short(' '.join(sentence.split()), LONGEST)}{seen}")


def short(text: str, size: int = 60) -> str:
    """A text of at most `size` characters."""
    return text if len(text) <= size else f"{text[: size - 4]} ..."


# ---------------------------------------------------------------- one format each
def _chosen(rows: pl.LazyFrame, choose: Choose) -> Table:
    columns = rows.collect_schema().names()
    chosen = choose(columns)
    return Table(rows.select(chosen.numbers + chosen.others).collect(), columns)


def _parquet(path: Path) -> Path | bytes:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix == ".zst":
        try:
            from compression import zstd  # Python 3.14  # pyright: ignore[reportMissingImports]
        except ImportError:
            refuse(path, "unpack it first (zstd -d); a Parquet file is packed inside")
        return zstd.decompress(path.read_bytes())
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(size - 4, 0))
        end = file.read(4)
    if start != b"PAR1":
        refuse(path, f"cannot be read (no Parquet file begins with {start!r})")
    if end != b"PAR1":
        refuse(path, "cannot be read (the end is missing: still being written, or cut)")
    return path


def _json(path: Path, choose: Choose) -> Table:
    try:
        escaped = glob.escape(str(path))
        quick = _chosen(pl.scan_ndjson(escaped, infer_schema_length=None), choose)
        if all(is_plain(quick.rows.schema[name]) for name in choose(quick.columns).numbers):
            return quick
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        pass  # the lines themselves say what is wrong
    if kind_of(path) == ".json" and (whole := _whole(path)) is not None:
        return _of_rows(path, whole, choose)
    try:
        lines = pl.read_lines(path, glob=False)["line"]
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        refuse(path, f"cannot be read as lines of JSON ({_first_line(error)})")
    numbers = (lines.str.strip_chars() != "").arg_true()
    rows = [_row(path, int(i), lines[i], last=i == numbers[-1]) for i in numbers]
    return _of_rows(path, rows, choose)


def _whole(path: Path) -> list[dict] | None:
    """Rows of a file that is one JSON value; None for lines of JSON."""
    try:
        packed = path.suffix == ".gz"
        value = json.loads(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    except (ValueError, RecursionError, OSError, EOFError):
        return None
    rows = value if isinstance(value, list) else [value]
    if not rows or any(not isinstance(row, dict) for row in rows):
        refuse(path, "is JSON, but neither an object with columns nor a list of such")
    return rows


def _samples(path: Path) -> list[dict]:
    """`samples` of a torch file of plain containers and tensors; code in it never runs."""
    import torch

    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many classes
        refuse(
            path,
            f"holds Python objects or is damaged, and unpickling runs code: save plain lists and tensors ({_first_line(error)})",
        )
    rows = value.get("samples") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows or any(not isinstance(row, dict) for row in rows):
        refuse(path, "is a torch file without samples, a list of dicts")
    plain = lambda x: x.tolist() if isinstance(x, torch.Tensor) else x  # noqa: E731
    return [{name: plain(x) for name, x in row.items()} for row in rows]


def _of_rows(path: Path, rows: list[dict], choose: Choose) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    chosen = choose(columns)
    try:
        rows = unpacked(rows, chosen.numbers)
    except ValueError as error:
        number, text = error.args
        refuse(path, f"{place(path, number)}: {text}")
    more = {name for row in rows for name in row} - set(columns)
    if more:
        ids = [x for x in (ids_column(name) for name in chosen.numbers) if x in more]
        chosen = Chosen(chosen.numbers + ids, chosen.others + sorted(more - set(ids)))
    series = [_series(path, x, [row.get(x) for row in rows]) for x in chosen.numbers]
    for name in chosen.others:
        try:
            series.append(pl.Series(name, [row.get(name) for row in rows]))
        except (TypeError, OverflowError, pl.exceptions.PolarsError):
            continue  # of mixed types: no numbers
    return Table(pl.DataFrame(series), columns)


def is_plain(dtype) -> bool:
    """Numbers or flags, or lists of them."""
    while isinstance(dtype, (pl.List, pl.Array)):
        dtype = dtype.inner
    return dtype.is_numeric() or dtype == pl.Boolean


def _row(path: Path, index: int, line: str, last: bool) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        inside = error.pos >= len(line.rstrip()) - 1 or "Unterminated" in error.msg
        if last and index and inside:
            cut = (
                f"cannot be read: line {index + 1} ends inside a row (still being written, or cut)"
            )
            refuse(path, f"{cut}; head -n {index} keeps the whole rows")
        refuse(path, f"cannot be read (line {index + 1} is not JSON: {error.msg})")
    except (ValueError, RecursionError) as error:
        refuse(path, f"cannot be read (line {index + 1} is not JSON: {_first_line(error)})")
    if not isinstance(row, dict):
        refuse(path, f"line {index + 1} is not an object with columns")
    return row


def _series(path: Path, name: str, values: list) -> pl.Series:
    """A column of numbers or of lists of numbers; a null entry of a list is NaN."""
    for i, value in enumerate(values):
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], list):  # a batch of one
                value = value[0]
            odd = next((x for x in value if not (x is None or _number(x))), None)
            if odd is not None:
                odd = short(repr(odd))
                refuse(path, f"{place(path, i)}: {name} holds {odd}, not a number")
            values[i] = np.array([np.nan if x is None else _float(x) for x in value], dtype=float)
        elif not (value is None or _number(value)):
            refuse(path, f"{place(path, i)}: {name} is {short(repr(value))}, not a list")
    lists = [isinstance(value, np.ndarray) for value in values]
    if any(lists) and any(map(_number, values)):  # numbers, some of them in a list of one
        single = [x and len(value) == 1 for x, value in zip(lists, values, strict=True)]
        values = [value[0] if x else value for x, value in zip(single, values, strict=True)]
        lists = [isinstance(value, np.ndarray) for value in values]
    if any(lists):
        for i, value in enumerate(values):
            if value is not None and not lists[i]:
                refuse(path, f"{place(path, i)}: {name} is {short(repr(value))}, not a list")
        entries = [None if value is None else pl.Series(value) for value in values]
        return pl.Series(name, entries, dtype=pl.List(pl.Float64))
    return pl.Series(name, [None if x is None else _float(x) for x in values], dtype=pl.Float64)


def _number(x) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, str) and _is_version(x))


def _is_version(text: str) -> bool:
    """Engines return the version of their weights as text, "default" before the first push."""
    return text.isdecimal() or text == "default"


def _float(x) -> float:
    if x == "default":
        return np.nan
    try:
        return float(x)
    except OverflowError:  # a whole number of 400 digits
        return np.inf


def _first_line(error: BaseException) -> str:
    return short((str(error).strip() or type(error).__name__).splitlines()[0], 120)


def _packed() -> str:
    return f"one of them with {' or '.join(PACKED)}"
