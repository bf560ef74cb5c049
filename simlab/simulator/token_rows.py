"""A step of the simulator as rows of the token log."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import torch
from torch import Tensor

from simlab.core.tokens import TokenBatch
from simlab.simulator.exact import entropy
from simlab.token_log.rows import from_batch


def simulator_rows(
    b: TokenBatch,
    *,
    step: int,
    seeds: Sequence[int],
    slot: Tensor,
    reward: Tensor,
    logp_rollout: Tensor,
    logp: Tensor,
) -> pl.DataFrame:
    """Rows of one step of `train`, with a lane for every seed.

    `slot` `[L, N]` and `reward` `[L, P, G]` are those of the answers, `logp_rollout` and `logp` the
    tables `[L, P, T, M, V]` of the trainer at the rollout's weights and at those of the step. A batch
    is used for one step, so the log-probs before the step and in the loss are the same numbers.
    """
    L, P, G = reward.shape
    V = logp.shape[-1]
    of_state = entropy(logp.detach().flatten(1, -2))  # [L, states]
    return from_batch(
        b,
        step=step,
        trainer_version=step,
        token_ids=slot % V,
        group=(torch.arange(P * G) // G).expand(L, P * G),
        reward=reward,
        lanes=seeds,
        trainer_logprobs_step=b.logp,
        trainer_logprobs_before=logp_rollout.flatten(1).gather(-1, slot),
        entropy=of_state.gather(-1, slot // V),
    )
