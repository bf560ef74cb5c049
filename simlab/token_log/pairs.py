"""Trainer and rollout log-probs out of a log: flat columns, one number a token, and no rows as objects.

A log is a file, a folder of files or a glob (`members` of files.py); a file has one row a response
(list columns) or one row a token. `flat_columns` is the seam for other layouts: it takes a frame to
`Tokens`, and everything behind it (comparable.py) knows flat arrays only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from simlab.token_log.columns import flat_columns
from simlab.token_log.comparable import examine
from simlab.token_log.entries import flat
from simlab.token_log.faults import Finding
from simlab.token_log.files import members
from simlab.token_log.join import joined as beside_each_other
from simlab.token_log.names import Names, needed
from simlab.token_log.readers import recognise, slime, without_log_probs
from simlab.token_log.tables import Chosen, refuse, table
from simlab.token_log.tokens import Tokens, joined
from simlab.token_log.windows import Window, windows

BINS = 20  # of log p


class Pairs(NamedTuple):
    """Log-probs of all sampled tokens that can be compared, nats `[N]`, and what was left out."""

    trainer: np.ndarray
    rollout: np.ndarray
    notes: list[str]


def read_pairs(path: str, names: Names = Names()) -> tuple[np.ndarray, np.ndarray]:  # noqa: B008
    """Trainer and rollout log-probs of `noise_pairs`, without its notes."""
    return noise_pairs(path, names)[:2]


def noise_pairs(path: str, names: Names = Names()) -> Pairs:  # noqa: B008
    """Trainer and rollout log-probs of a log whose gap is engine noise.

    Raises ValueError in one sentence naming file, row and column, or the cause that makes the columns
    no measurement of noise with the number that decided.
    """
    tokens, findings = read_tokens(path, names)
    refuse_first(path, findings, tokens)
    findings += examine(tokens)
    refuse_first(path, findings, tokens)
    keep = tokens.mask.copy()
    for finding in findings:
        if finding.tokens is not None:
            keep[finding.tokens] = False
    notes = [x.text(tokens) for x in findings]
    if (n := int(keep.sum())) < BINS:
        left_out = f" ({'; '.join(notes)})" if notes else ""
        refuse(path, f"{n} unmasked tokens, at least {BINS} are needed{left_out}")
    pair = (x if n == len(keep) else x[keep] for x in (tokens.trainer, tokens.rollout))
    trainer, rollout = (np.minimum(x, 0) if (x > 0).any() else x for x in pair)
    return Pairs(trainer, rollout, notes)


def refuse_first(path: str, findings: list[Finding], tokens: Tokens) -> None:
    """The one place that turns findings into refusals: raises ValueError for the first that refuses."""
    for finding in findings:
        if finding.refuses:
            refuse(path, finding.text(tokens))


def read_tokens(
    path: str,
    names: Names = Names(),  # noqa: B008
    more: Collection[str] = (),
    join: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tokens, list[Finding]]:
    """All tokens of a file, a folder or a glob, with further roles, and findings on rows left out.

    `progress` is told how many parts are read. The columns of a file `join` about the same responses are put beside those of `path`, a file too. Raises ValueError in one sentence that names the file and, where it applies, row and column.
    """
    parts, findings, by_reader = [], [], {}
    files = slime.own(members(path))
    if join and len(files) > 1:
        refuse(path, f"holds {len(files)} files; join one file with one")
    todo = [(file, window) for file in files for window in windows(file)]
    for i, (file, window) in enumerate(todo):
        progress(i, len(todo))
        tokens, on_rows, reader = _read_file(file, names, more, join, window)
        if window.first:
            tokens = replace(tokens, row=tokens.row + window.first)
        else:
            by_reader.setdefault(reader, []).append(file)
        parts.append(tokens)
        findings += on_rows
        if tokens.at_rollout != parts[0].at_rollout:
            refuse(
                file,
                f"has another trainer column than {parts[0].files[0].name}: only one of them has trainer_logprobs_before",
            )
    for reader, files in by_reader.items():
        findings += getattr(reader, "on_files", lambda files: [])(files)
    return joined(parts), findings


def _there(names: Names, columns: Sequence[str]) -> Names:
    """A reader's names, without further roles whose columns a file lacks."""
    pair, rest = names[:2], names[2:]
    return Names(*pair, *(x if x in (*columns, "none") else "" for x in rest))


def _read_file(
    file: Path, given: Names, more: Collection[str], join: str, window: Window
) -> tuple[Tokens, list[Finding], ModuleType | None]:
    """Tokens of one file, and the reader that its columns are of; names that are given win over the reader's."""
    used: dict[str, Any] = {}

    def choose(columns: Sequence[str]) -> Chosen:
        reader = recognise(columns)
        names = given if reader is None else given.over(_there(reader.NAMES, columns))
        cure = without_log_probs(columns)
        if cure and any(names.column(x, columns) == "" for x in ("trainer", "rollout")):
            refuse(file, cure)
        used.update(reader=reader, names=names)
        chosen = needed(file, columns, names, more)
        used["pair"] = chosen.numbers[:2]
        also = [] if reader is None else [x for x in reader.ALSO if x in columns]
        wanted = [x for x in also if x not in chosen.numbers]
        return Chosen(chosen.numbers + wanted, [x for x in chosen.others if x not in wanted])

    if join:
        rows = beside_each_other(file, Path(join))
        chosen = choose(rows.columns)
        rows = rows.select(chosen.numbers + chosen.others)
    else:
        rows = table(file, choose, window).rows
    reader, findings = used["reader"], []
    rows = flat(rows, used["pair"])
    rows = rows if reader is None else reader.rows(rows)
    if more and reader is not None and hasattr(reader, "beside"):
        rows, findings = reader.beside(file, rows)
    tokens, on_rows = flat_columns(file, rows, used["names"], more)
    return tokens, findings + on_rows, reader
