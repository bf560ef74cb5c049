"""miles' policy_loss_debug/rank_R_call_C.pt: current, old and (where logged) rollout log-probs of each sample."""

from __future__ import annotations

import polars as pl

from simlab.token_log.names import Names

MARKS = (frozenset({"train_log_probs", "old_log_probs", "local_loss_mask"}),)
NAMES = Names(
    trainer="train_log_probs", rollout="rollout_log_probs", mask="local_loss_mask", proximal="old_log_probs", version="none"
)  # fmt: skip
ALSO = ()


def rows(frame: pl.DataFrame) -> pl.DataFrame:
    """As it is."""
    return frame
