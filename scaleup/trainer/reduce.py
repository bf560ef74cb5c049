"""Numbers of the whole batch: sums over the data-parallel ranks, and what the last pipeline stage tells.

Only the last stage has logits and thus numbers of tokens; the others are told by `from_last_stage`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from scaleup.models.megatron import parallel_state


def is_last_stage() -> bool:
    """Whether this rank holds the last pipeline stage."""
    return parallel_state.is_pipeline_last_stage()


def all_reduce(x: Tensor, op, group) -> Tensor:
    """The all-reduce of a contiguous x, in place."""
    x = x.contiguous()
    dist.all_reduce(x, op, group=group)
    return x


def batch_sum(x: Tensor) -> Tensor:
    """Sum over the data-parallel ranks: the `reduce` of the core."""
    group = parallel_state.get_data_parallel_group()
    return all_reduce(x.clone(), dist.ReduceOp.SUM, group)


def batch_max(x: Tensor) -> Tensor:
    """Maximum over the data-parallel ranks; x may be overwritten."""
    return all_reduce(x, dist.ReduceOp.MAX, parallel_state.get_data_parallel_group())


def world_sum(x: Tensor) -> Tensor:
    """Sum over all ranks of the trainer."""
    return all_reduce(x, dist.ReduceOp.SUM, None)


def shard(optimizer) -> dict[str, Tensor]:
    """This rank's share of the whole gradient, each entry `[1, n]`; no number lies on two ranks.

    It is what Megatron's optimizer takes the norm of, after `prepare_grads`.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    grads = [x for part in parts for x in part.get_main_grads_for_grad_norm()]
    first = grads[0].new_zeros(1) if grads else torch.zeros(1)
    return {str(i): x.reshape(1, -1) for i, x in enumerate([first, *grads])}


def from_last_stage(value):
    """Return the value of the last pipeline stage on every stage; collective."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, source, group=group)
    return box[0]
