"""slime's --dump-details: train_data/{id}.pt, a dict with samples, in plain containers and tensors.

`log_probs` are the trainer's before the step, or of the training forward where the recompute is skipped.
"""

from __future__ import annotations

import polars as pl

from simlab.token_log.names import Names

MARKS = (frozenset({"log_probs", "rollout_log_probs", "loss_masks"}),)
NAMES = Names(
    trainer="log_probs", rollout="rollout_log_probs", mask="loss_masks", token="tokens", reward="rewards", version="none"
)  # fmt: skip
ALSO = ()


def rows(frame: pl.DataFrame) -> pl.DataFrame:
    """As it is."""
    return frame
