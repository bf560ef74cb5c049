"""Which rows of a file are read at once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import polars as pl


class Window(NamedTuple):
    """Rows of a file that are read at once."""

    first: int = 0
    rows: int | None = None  # to the end


WHOLE = Window()
LARGE = 1 << 26  # bytes of a Parquet file that is read in parts


def windows(path: Path) -> list[Window]:
    """A large Parquet file with one row a response in parts; any other file as a whole."""
    size = path.stat().st_size if path.suffix == ".parquet" and path.is_file() else 0
    if size <= LARGE:
        return [Window()]
    try:
        schema = pl.read_parquet_schema(path)
        rows = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()
    except (OSError, pl.exceptions.PolarsError):
        return [Window()]  # reading it says why
    if not any(isinstance(x, (pl.List, pl.Array)) for x in schema.values()):
        return [Window()]
    each = max(rows * LARGE // size, 1)
    return [Window(first, each) for first in range(0, rows, each)]
