"""slime's --dump-details: train_data/{id}.pt, a dict with samples, in plain containers and tensors.

`log_probs` are the trainer's before the step, or of the training forward where the recompute is skipped. The
samples of rollout_data/{id}.pt beside it are joined by `rollout_position`, their index there: group and version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from simlab.token_log.faults import Finding
from simlab.token_log.names import Names
from simlab.token_log.tables import Chosen, table

MARKS = (frozenset({"log_probs", "rollout_log_probs", "loss_masks"}),)
NAMES = Names(
    trainer="log_probs", rollout="rollout_log_probs", mask="loss_masks", token="tokens", reward="rewards", version=""
)  # fmt: skip
ALSO = ("rollout_position",)
WANTED = ("group_index", "weight_versions")
ROLLOUT = "rollout_data"


def rows(frame: pl.DataFrame) -> pl.DataFrame:
    """As it is."""
    return frame


def own(files: Sequence[Path]) -> list[Path]:
    """The files that are logs: those of rollout_data belong to the train_data beside it."""
    trained = {x.parent.parent for x in files if x.parent.name == "train_data"}
    return [x for x in files if not (x.parent.name == ROLLOUT and x.parent.parent in trained)]


def beside(file: Path, frame: pl.DataFrame) -> tuple[pl.DataFrame, list[Finding]]:
    """The frame with group and versions of the rollout file, and a note where that cannot be."""
    other = file.parent.parent / ROLLOUT / file.name
    if not other.exists() or "rollout_position" not in frame.columns:
        return frame, []
    if file.stem.isdecimal():
        frame = frame.with_columns(step=pl.lit(int(file.stem)))
    try:
        samples = table(other, lambda columns: Chosen([], [x for x in WANTED if x in columns])).rows
    except ValueError as error:
        return frame, [_unjoined(str(error))]
    position = frame["rollout_position"].cast(pl.Int64)
    if position.null_count() or not position.is_between(0, len(samples) - 1).all():
        return frame, [
            _unjoined(f"rollout_position goes beyond the {len(samples)} samples of {other.name}")
        ]
    samples, findings = samples[position.to_numpy()], []
    if "group_index" in samples.columns:
        frame = frame.with_columns(samples["group_index"].alias("group"))
    if "weight_versions" in samples.columns:
        x = samples["weight_versions"]
        lists = x if isinstance(x.dtype, pl.List) else x.reshape((-1, 1)).arr.to_list()
        several = int((lists.list.n_unique() != 1).sum())
        if several:
            text = f"{several:,} of {len(x):,} samples have several weight_versions, one a request and not one a token: versions are not used"
            findings.append(Finding("unused column", several, text, refuses=False))
        else:
            frame = frame.with_columns(lists.list.head(1).alias("weight_versions"))
    return frame, findings


def _unjoined(why: str) -> Finding:
    text = f"{ROLLOUT} is not joined: {why}"
    return Finding("unused column", 1, text, refuses=False)
