"""Flat columns of a log: the seam between a layout of files and everything that is computed on tokens.

`flat_columns` takes a frame of this project's names, one row a response or one row a token. A reader of
another framework is another function with the same result.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import polars as pl

from simlab.token_log.entries import ids_column
from simlab.token_log.faults import Finding
from simlab.token_log.lists import lists_of, numbers_of, spread
from simlab.token_log.names import (
    AGE_LIKE,
    BEFORE,
    IDS,
    KEYS,
    MASK_LIKE,
    VERSION_LIKE,
    Names,
    cure_of,
    score_column,
)
from simlab.token_log.tables import is_plain, place, refuse
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
    lists = {name: lists_of(path, rows, name) for name in (score, rollout)}
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
    own_ids = [x for x in map(ids_column, (score, rollout)) if x in rows.columns]
    lists |= {name: lists_of(path, rows, name) for name in own_ids}
    if version:
        lists[version] = spread(lists[version], lists[rollout])
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
    values = {name: numbers_of(path, name, x) for name, x in lists.items()}
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
    for name in own_ids:
        findings += _other_ids(tokens, name, values[name], "token" in more)
    _no_other_mask(path, rows, tokens, names, more)
    _no_other_version(path, rows, tokens, names, more)
    return tokens, findings


def _other_ids(t: Tokens, name: str, ids: np.ndarray, wanted: bool) -> list[Finding]:
    """Tokens whose id beside the log-prob is not that of the column of ids; without one they are the ids."""
    token = t.extra.setdefault("token", ids) if wanted else ids
    bad = np.flatnonzero(t.mask & np.isfinite(token) & (token != ids))
    if not len(bad):
        return []
    i = int(bad[0])
    text = f"{{place}}: {name} has {ids[i]:.0f} where the column of ids has {token[i]:.0f} ({len(bad):,} tokens): other tokens were scored"
    return [Finding("other ids", len(bad), text, token=i, tokens=bad)]


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
        lists, sizes = spread(lists_of(path, rows, name), like), like.list.len()
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
        extra[role] = numbers_of(path, name, lists.alias(name))
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
    return lists_of(path, rows, name)


def _mask(path: Path, name: str, x: np.ndarray, lengths: np.ndarray, number: np.ndarray):
    if (odd := ~np.isin(x, (0, 1))).any():
        row = int(np.searchsorted(np.cumsum(lengths), odd.argmax(), side="right"))
        refuse(path, f"{place(path, int(number[row]))}: {name} must hold 0 and 1 only")
    return x > 0


def _trained(path: Path, rows: pl.DataFrame, names: Names, like: pl.Series) -> np.ndarray | None:
    """The trainer's version, one a token."""
    name = names.column("trained", rows.columns)
    return numbers_of(path, name, spread(lists_of(path, rows, name), like)) if name else None


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
        lists = lists_of(path, rows, name)
        same = (lists.list.len().fill_null(0).to_numpy() == np.diff(tokens.starts)).all()
        x = numbers_of(path, name, lists)
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
    for name in (x for x in rows.columns if VERSION_LIKE.search(x)):
        x = rows[name]
        x = x.explode() if isinstance(x.dtype, pl.List) else x
        if not (x.dtype.is_numeric() or x.dtype == pl.String):
            continue
        x = x.cast(pl.Float64, strict=False)
        ages = AGE_LIKE.search(name) and (x.drop_nulls() == 0).all()
        if not ages and x.null_count() < len(x):
            cure = f"say {cure_of('version', name, more)} (or version=none)"
            refuse(path, f"no weight_versions, but {name} may say which weights sampled; {cure}")
