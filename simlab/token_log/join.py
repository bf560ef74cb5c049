"""Two files about the same responses, joined by an id or by the ids of their tokens, never by the number of the row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from simlab.token_log.names import IDS
from simlab.token_log.tables import Chosen, refuse, table

NAMES = (*IDS, "request_id", "sample_id", "uid", "id", "index", "sample_idx")  # of a response
TOKENS = ("token_ids", "tokens", "response_ids", "output_ids", "response_tokens")


def joined(path: Path, other: Path) -> pl.DataFrame:
    """The rows of a file with the columns that only the other has.

    Raises ValueError in one sentence where no column names the responses of both.
    """
    mine, its = (_whole(x) for x in (path, other))
    both = [x for x in mine.columns if x in its.columns]
    keys = [x for x in ("step",) if x in both]
    pair, tried = None, []
    for name in (*NAMES, *TOKENS):
        if name not in both:
            continue
        own, theirs = (_key(frame, [*keys, name]) for frame in (mine, its))
        if own.is_duplicated().any() or theirs.is_duplicated().any():
            tried.append(f"{name} is not unique")
        elif not own.is_in(theirs.implode()).any():
            tried.append(f"{name} has no value in common")
        else:
            pair = own, theirs
            break
    if pair is None:
        why = f" ({'; '.join(tried)})" if tried else ""
        refuse(
            path,
            f"cannot be joined with {other.name}: no id of a response and no ids of tokens in both{why}, and numbers of rows are no key; log one id on both sides",
            both,
        )
    more = its.select(x for x in its.columns if x not in both)
    left, right = mine.with_columns(_key=pair[0]), more.with_columns(_key=pair[1])
    return left.join(right, on="_key", how="left", maintain_order="left").drop("_key")


def _whole(path: Path) -> pl.DataFrame:
    def every(columns: Sequence[str]) -> Chosen:
        return Chosen([], list(columns))

    return table(path, every).rows


def _key(frame: pl.DataFrame, names: list[str]) -> pl.Series:
    """The columns as one text a row, equal where a whole number was read as a float."""
    parts = []
    for name in names:
        x = frame[name]
        if isinstance(x.dtype, pl.List):
            x = x.cast(pl.List(pl.Int64), strict=False).cast(pl.List(pl.String)).list.join(",")
        elif x.dtype.is_float():
            x = x.cast(pl.Int64, strict=False)
        parts.append(x.cast(pl.String))
    return pl.DataFrame(parts).select(pl.concat_str(pl.all(), separator="/")).to_series()
