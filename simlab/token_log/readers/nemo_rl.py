"""NeMo-RL's train_data_step{N}.jsonl: a sample a row, every value wrapped in a list of one, padded on the right.

Slot 0 is a dummy, slot t the log-prob of token t; what is past `input_lengths` is padding, and a sample
with `sample_loss_mask` 0 trains nothing.
"""

from __future__ import annotations

import polars as pl

from simlab.token_log.names import Names

MARKS = (frozenset({"generation_logprobs", "prev_logprobs", "token_loss_mask", "input_lengths"}),)
NAMES = Names(
    trainer="prev_logprobs", rollout="generation_logprobs", mask="token_loss_mask", reward="rewards", version="none"
)  # fmt: skip
ALSO = ("input_lengths", "sample_loss_mask")


def rows(frame: pl.DataFrame) -> pl.DataFrame:
    """The mask without padding and without the samples that are left out."""
    names = ("generation_logprobs", "prev_logprobs", "token_loss_mask", "advantages", "token_ids")
    for name in (x for x in (*names, *ALSO, "rewards") if x in frame.columns):
        dtype = frame.schema[name]
        wrapped = isinstance(dtype, pl.List) and (
            name not in names or isinstance(dtype.inner, pl.List)
        )
        if wrapped:
            frame = frame.with_columns(pl.col(name).list.first())
    if "sample_loss_mask" in frame.columns:
        keep = pl.col("sample_loss_mask").cast(pl.Float64) > 0
        none = pl.col("token_loss_mask").list.eval(pl.element() * 0)
        frame = frame.with_columns(
            token_loss_mask=pl.when(keep).then(pl.col("token_loss_mask")).otherwise(none)
        )
    if "input_lengths" in frame.columns:
        length = pl.col("input_lengths").cast(pl.Int64)
        lists = [x for x in names if x in frame.columns and isinstance(frame.schema[x], pl.List)]
        frame = frame.with_columns(pl.col(x).list.head(length) for x in lists)
    return frame
