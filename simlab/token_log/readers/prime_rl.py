"""prime-rl's token exports: token_exports/step_N/rank_R.jsonl, a packed sequence a row.

Position t holds the log-prob of token t, prompt included; what is not finite is null. `position_ids` begin
anew with each sequence of a pack, whose first token nothing predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from simlab.token_log.faults import Finding
from simlab.token_log.names import Names

MARKS = (frozenset({"inference_logprobs", "trainer_logprobs", "loss_mask"}),)
NAMES = Names(rollout="inference_logprobs", version="none")
ALSO = ("position_ids", "rank", "micro_step", "micro_sequence_idx", "export_sequence_idx")


def rows(frame: pl.DataFrame) -> pl.DataFrame:
    """One row a sequence."""
    key = [x for x in ALSO[1:] if x in frame.columns]
    if key:
        frame = frame.with_columns(response_id=pl.concat_str(key, separator="-"))
    if "position_ids" not in frame.columns:
        return frame
    lists = [x for x, dtype in frame.schema.items() if isinstance(dtype, pl.List)]
    starts = pl.col("position_ids").list.eval((pl.element().diff() != 1).fill_null(True).sum())
    if frame.select(starts.list.first().max()).item() in (None, 0, 1):
        return frame
    long = frame.with_row_index("_row").explode(lists)
    begins = (pl.col("position_ids").diff() != 1) | (pl.col("_row").diff() != 0)
    long = long.with_columns(_sequence=begins.fill_null(True).cum_sum())
    first = pl.col("_sequence") != pl.col("_sequence").shift(1).fill_null(0)
    long = long.with_columns(loss_mask=pl.col("loss_mask").cast(pl.Float64) * (~first))
    others = [x for x in frame.columns if x not in lists]
    packed = long.group_by("_sequence", maintain_order=True).agg(
        pl.col(lists), pl.col(others).first(), pl.col("_row").first()
    )
    if "response_id" in others:
        number = pl.col("_sequence").rank("dense").over("_row").cast(pl.Int64)
        packed = packed.with_columns(
            response_id=pl.concat_str(["response_id", number], separator=".")
        )
    return packed.select(frame.columns)


def on_files(files: Sequence[Path]) -> list[Finding]:
    """Steps without the marker STABLE, which other steps of the log have: a rank is still writing."""
    steps = sorted({x.parent for x in files})
    open_steps = [x for x in steps if not (x / "STABLE").exists()]
    if not open_steps or len(open_steps) == len(steps):
        return []
    text = f"{', '.join(x.name for x in open_steps[:5])} of {len(steps)} steps have no file STABLE: still being written, or cut"
    return [Finding("unfinished", len(open_steps), text, refuses=False)]
