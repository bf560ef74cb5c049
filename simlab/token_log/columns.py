"""Flat columns of a log: the seam between a layout of files and everything that is computed on tokens.

`flat_columns` takes a frame of this project's names, one row a response or one row a token. A reader of
another framework is another function with the same result.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import polars as pl

from simlab.token_log.faults import Finding
from simlab.token_log.names import (
    AGE_LIKE,
    BEFORE,
    IDS,
    KEYS,
    MASK_LIKE,
    NOT_VERSIONS,
    VERSION_LIKE,
    Names,
    cure_of,
    score_column,
)
from simlab.token_log.tables import is_plain, place, refuse, short
from simlab.token_log.tokens import PER_RESPONSE, PER_TOKEN, Tokens


# ---------------------------------------------------------------- a frame to flat columns
def flat_columns(
    path: Path, rows: pl.DataFrame, names: Names, more: Collection[str] = ()
) -> tuple[Tokens, list[Finding]]:
    """Tokens of one file, with the further roles `more`, and findings on the rows that are left out.

    Raises ValueError in one sentence that names the file and, where it applies, row and column.
    """
    score, rollout = score_column(rows.columns, names, more), names.rollout or "rollout_logprobs"
    rows = rows.with_row_index("#")
    alone = rows.schema[rollout].is_numeric() and rows.schema[score].is_numeric()
    if alone:
        rows = _responses(rows)
    lists = {name: _lists(path, rows, name) for name in (score, rollout)}
    findings = []
    left_out = _left_out(path, rows, lists, score)
    if left_out.any():
        findings.append(_missing(path, rows, left_out, alone))
        rows = rows.filter(~left_out)
        lists = {name: x.filter(~left_out) for name, x in lists.items()}
    mask, version = _role(rows, names, "mask"), _role(rows, names, "version")
    number = _row_numbers(rows, alone)
    for name in filter(None, (mask, version)):
        lists[name] = _optional(path, rows, name, number)
    if version:
        lists[version] = _spread(lists[version], lists[rollout])
    sizes = {name: x.list.len().fill_null(0).to_numpy() for name, x in lists.items()}
    uneven = np.any([x != sizes[score] for x in sizes.values()], axis=0)
    if uneven.any():
        i = int(uneven.argmax())
        each = ", ".join(f"{x[i]} {name}" for name, x in sizes.items())
        text = f"{place(path, int(number[i]))} has {each} entries"
        text += f"; {int(uneven.sum()):,} of {len(uneven):,} rows" if len(uneven) > 1 else ""
        findings.append(Finding("lengths", int(uneven.sum()), text))
        rows = rows.filter(~uneven)
        lists = {name: x.filter(~uneven) for name, x in lists.items()}
        number = number[~uneven]
    lengths = sizes[score][~uneven].astype(np.int64)
    values = {name: _numbers(path, name, x) for name, x in lists.items()}
    sampled = np.ones(int(lengths.sum()), dtype=bool)
    tokens = Tokens(
        trainer=values[score],
        rollout=values[rollout],
        mask=_mask(path, mask, values[mask], lengths, number) if mask else sampled,
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        files=(path,),
        file=np.zeros(len(rows), dtype=int),
        row=number,
        keys=_keys(rows),
        version=values[version] if version else None,
        trained=_trained(path, rows, names, lists[rollout]) if version else None,
        at_rollout=score == BEFORE,
        token_row=rows["#"].explode().to_numpy() if alone else None,
        columns=(score, rollout),
        extra=_extra(path, rows, names, more, lists[rollout], findings),
    )
    _no_other_mask(path, rows, tokens, names, more)
    _no_other_version(path, rows, tokens, names, more)
    return tokens, findings


def _row_numbers(rows: pl.DataFrame, alone: bool) -> np.ndarray:
    return (rows["#"].list.first() if alone else rows["#"]).to_numpy()


def _missing(path: Path, rows: pl.DataFrame, left_out: pl.Series, alone: bool) -> Finding:
    """Rows without log-probs on one side."""
    first, n = int(_row_numbers(rows.filter(left_out), alone)[0]), int(left_out.sum())
    text = f"{n:,} of {len(rows):,} rows have no log-probs on one side and are left out, {place(path, first)} of {path.name} first"
    return Finding("missing", n, text, refuses=False)


def _extra(
    path: Path,
    rows: pl.DataFrame,
    names: Names,
    more: Collection[str],
    like: pl.Series,
    findings: list[Finding],
) -> dict[str, np.ndarray]:
    """Columns by role: numbers a token `[N]` or a response `[R]`, NaN where a row has none.

    A column of other lengths is left alone and said so; longer ids begin with the prompt.
    """
    extra = {}
    for role in (x for x in PER_TOKEN if x in more):
        name = _role(rows, names, role)
        if not name:
            continue
        lists, sizes = _spread(_lists(path, rows, name), like), like.list.len()
        lists = pl.select(
            pl.when(lists.list.len().fill_null(0) == 0)
            .then(pl.lit(None, pl.Float64).repeat_by(sizes))
            .otherwise(lists.cast(pl.List(pl.Float64), strict=False))
        ).to_series()
        if role == "token" and (lists.list.len() > sizes).all():
            lists = pl.select(pl.lit(lists).list.tail(pl.lit(sizes))).to_series()
        if (odd := lists.list.len() != sizes).any():
            text = f"{name} has other lengths than the log-probs in {int(odd.sum()):,} rows and is not used"
            findings.append(Finding("unused column", int(odd.sum()), text, refuses=False))
            continue
        extra[role] = _numbers(path, name, lists.alias(name))
    for role in (x for x in PER_RESPONSE if x in more):
        name = _role(rows, names, role)
        if not name:
            continue
        x = rows[name]
        while isinstance(x.dtype, pl.List):
            x = x.list.first()
        if x.dtype == pl.String:
            x = x.rank("dense")  # names of prompts become numbers
        if x.dtype.is_numeric() or x.dtype == pl.Boolean:
            extra[role] = x.cast(pl.Float64).fill_null(np.nan).to_numpy()
    text = names.column("text", rows.columns) if "text" in more else ""
    if text and rows.schema[text] == pl.List(pl.String):
        words = rows[text]
        if (words.list.len().fill_null(0) == like.list.len()).all():
            extra["text"] = words.filter(words.list.len() > 0).explode().to_numpy()
    return extra


def _responses(rows: pl.DataFrame) -> pl.DataFrame:
    """One row a token to one row a response; without a key all tokens are one response."""
    keys = [x for x in KEYS if x in rows.columns]
    if not keys:
        return rows.select(pl.all().implode())
    return rows.group_by(keys, maintain_order=True).agg(pl.all())


def _role(rows: pl.DataFrame, names: Names, role: str) -> str:
    """The column that has a role, "" if there is none or it says nothing."""
    name = names.column(role, rows.columns)
    return "" if not name or rows[name].is_null().all() else name


def _keys(rows: pl.DataFrame) -> np.ndarray:
    """Numbers `[R, K]` that name a response; none where no column does."""
    text = [x for x in IDS if x.endswith("_id") and rows.schema.get(x) == pl.String]
    known = [x for x in KEYS if x in rows.columns and rows.schema[x].is_numeric()]
    if not {*text, *known} & {*IDS}:
        return np.zeros((len(rows), 0))
    columns = [rows[x].hash() if x in text else rows[x] for x in text + known]
    return np.stack([x.cast(pl.Float64).to_numpy() for x in columns], axis=1)


def _lists(path: Path, rows: pl.DataFrame, name: str) -> pl.Series:
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


def _left_out(path: Path, rows: pl.DataFrame, lists: dict[str, pl.Series], score: str) -> pl.Series:
    """Rows that lack one of the two log-probs altogether."""
    empty = {name: x.list.len().fill_null(0) == 0 for name, x in lists.items()}
    trainer, rollout = empty.values()
    if score == BEFORE and (trainer & ~rollout).any() and not trainer.all():
        where = place(path, int((trainer & ~rollout).arg_max() or 0))
        refuse(
            path, f"{where} has no {BEFORE}, other rows have; the columns differ in their weights"
        )
    null = [x.is_null() for x in lists.values()]
    return (trainer ^ rollout) | (null[0] & null[1])


def _optional(path: Path, rows: pl.DataFrame, name: str, number: np.ndarray) -> pl.Series:
    if rows[name].null_count():
        where = place(path, int(number[rows[name].is_null().arg_max()]))
        refuse(path, f"{where} has no {name}, other rows have")
    return _lists(path, rows, name)


def _spread(lists: pl.Series, like: pl.Series) -> pl.Series:
    """One number a response becomes one a token."""
    sizes, one = like.list.len(), lists.list.len() == 1
    if not one.any():
        return lists
    spread = lists.list.first().repeat_by(sizes)
    return pl.select(pl.when(one).then(spread).otherwise(lists)).to_series()


def _numbers(path: Path, name: str, lists: pl.Series) -> np.ndarray:
    """Entries one after another; a null is NaN, floats stay as wide as they are."""
    x = lists.filter(lists.list.len() > 0).explode()
    if x.dtype not in (pl.Float32, pl.Float64):
        x = x.cast(pl.Float64, strict=False)
    return (x.fill_null(float("nan")) if x.null_count() else x).to_numpy()


def _mask(path: Path, name: str, x: np.ndarray, lengths: np.ndarray, number: np.ndarray):
    if (odd := ~np.isin(x, (0, 1))).any():
        row = int(np.searchsorted(np.cumsum(lengths), odd.argmax(), side="right"))
        refuse(path, f"{place(path, int(number[row]))}: {name} must hold 0 and 1 only")
    return x > 0


def _trained(path: Path, rows: pl.DataFrame, names: Names, like: pl.Series) -> np.ndarray | None:
    """The trainer's version, one a token."""
    name = names.column("trained", rows.columns)
    return _numbers(path, name, _spread(_lists(path, rows, name), like)) if name else None


def _no_other_mask(
    path: Path, rows: pl.DataFrame, tokens: Tokens, names: Names, more: Collection[str]
) -> None:
    """Raises ValueError if a column of 0 and 1 that is not all 1 may be a mask under another name."""
    if names.mask or "loss_mask" in rows.columns:
        return
    for name in (x for x in rows.columns if MASK_LIKE.search(x)):
        inner = getattr(rows.schema[name], "inner", None)
        if inner is None or isinstance(inner, (pl.List, pl.Array)) or not is_plain(inner):
            continue
        lists = _lists(path, rows, name)
        same = (lists.list.len().fill_null(0).to_numpy() == np.diff(tokens.starts)).all()
        x = _numbers(path, name, lists)
        if same and np.isin(x, (0, 1)).all() and not x.all():
            kept = f"{int(x.sum())} of {len(x)} tokens"
            cure = f"say {cure_of('mask', name, more)} (or mask=none)"
            refuse(path, f"no loss_mask, but {name} keeps {kept} and may be the mask; {cure}")


def _no_other_version(
    path: Path, rows: pl.DataFrame, tokens: Tokens, names: Names, more: Collection[str]
) -> None:
    """Raises ValueError if versions of the weights may stand under another name and may differ."""
    if names.version or tokens.version is not None or tokens.at_rollout:
        return
    for name in (x for x in rows.columns if VERSION_LIKE.search(x) and x not in NOT_VERSIONS):
        x = rows[name]
        x = x.explode() if isinstance(x.dtype, pl.List) else x
        if not (x.dtype.is_numeric() or x.dtype == pl.String):
            continue
        x = x.cast(pl.Float64, strict=False)
        ages = AGE_LIKE.search(name) and (x.drop_nulls() == 0).all()
        if not ages and x.null_count() < len(x):
            cure = f"say {cure_of('version', name, more)} (or version=none)"
            refuse(path, f"no weight_versions, but {name} may say which weights sampled; {cure}")
