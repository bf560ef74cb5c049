"""Columns of a log as lists of numbers, whatever a file made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from simlab.token_log.tables import place, refuse, short


def lists_of(path: Path, rows: pl.DataFrame, name: str) -> pl.Series:
    """A column as lists of numbers, a list in a list of one unwrapped."""
    x = rows[name]
    if isinstance(x.dtype, pl.Array):
        x = x.arr.to_list()
    if x.dtype == pl.String:
        x = _decoded(path, rows, x)
    if isinstance(x.dtype, pl.List) and isinstance(x.dtype.inner, (pl.List, pl.Array)):
        if (x.list.len() != 1).any():
            refuse(path, f"column {name} holds lists of lists, not numbers")
        x = x.list.first()
        x = x.arr.to_list() if isinstance(x.dtype, pl.Array) else x
    if x.dtype == pl.Null:
        return x.cast(pl.List(pl.Float64))
    if x.dtype.is_numeric():  # one number a response
        x = (
            x.reshape((-1, 1)).arr.to_list()
            if len(x)
            else x.cast(pl.List(pl.Float64), strict=False)
        )
    inner = x.dtype.inner if isinstance(x.dtype, pl.List) else None
    if inner is None or not (inner.is_numeric() or inner in (pl.Boolean, pl.String, pl.Null)):
        refuse(path, f"column {name} is {short(str(x.dtype))}, not a list of numbers")
    return x


def _decoded(path: Path, rows: pl.DataFrame, x: pl.Series) -> pl.Series:
    """Lists that a CSV file holds as text."""
    try:
        return x.str.json_decode(pl.List(pl.Float64))
    except pl.exceptions.PolarsError:
        for i, text in zip(rows["#"], x, strict=True):
            try:
                pl.Series([text]).str.json_decode(pl.List(pl.Float64))
            except pl.exceptions.PolarsError:
                refuse(path, f"{place(path, i)}: {x.name} is {short(repr(text))}, not numbers")
        raise


def spread(lists: pl.Series, like: pl.Series) -> pl.Series:
    """One number a response becomes one a token."""
    sizes, one = like.list.len(), lists.list.len() == 1
    if not one.any():
        return lists
    spread = lists.list.first().repeat_by(sizes)
    return pl.select(pl.when(one).then(spread).otherwise(lists)).to_series()


def numbers_of(path: Path, name: str, lists: pl.Series) -> np.ndarray:
    """Entries one after another; a null is NaN, floats stay as wide as they are."""
    x = lists.filter(lists.list.len() > 0).explode()
    if x.dtype not in (pl.Float32, pl.Float64):
        x = x.cast(pl.Float64, strict=False)
    return (x.fill_null(float("nan")) if x.null_count() else x).to_numpy()
