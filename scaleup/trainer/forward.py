"""The forward pass: micro-batches through Megatron's schedule, and log-probs from vocabulary-parallel logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from scaleup.models.megatron import parallel_state
from scaleup.trainer import routing_replay
from scaleup.trainer.reduce import all_reduce, is_last_stage
from scaleup.trainer.responses import MicroBatch
from simlab.core.logits import TokenScores, VocabShard, token_log_probs

from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip  after the shim


def schedule(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss: Callable,
    replay: str = "none",
    forward_only: bool = False,
) -> list:
    """Run every micro-batch through the pipeline; what `loss(micro, logits)` recorded, [] off the last stage.

    `replay` is none, r2 or r3: the routers replay `micro.routes`, which r2 records where there are none.
    """

    def forward_step(iterator, model):
        micro = next(iterator)
        recording = replay == "r2" and micro.routes is None
        if recording:
            routing_replay.record(model)
        elif replay != "none":
            routes = [x.to(micro.target.device, torch.int64) for x in micro.routes]
            routing_replay.use(model, routes)
        packed = micro.packed
        logits = model(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
        if recording:
            micro.routes = routing_replay.compact(routing_replay.recorded(model), model.config)
        elif replay != "none":
            routing_replay.recompute(model)
        return logits, partial(loss, micro)

    with routing_replay.replaying(model) if replay != "none" else nullcontext():
        records = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].packed.tokens.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return records if is_last_stage() else []


def score(
    micro: MicroBatch,
    logits: Tensor,
    temperature: float,
    entropy: bool = False,
    head: bool = False,
) -> TokenScores:
    """log pi of the sampled tokens `[N]` and, on request, the entropy `[N]`, without gradient, and the
    log-probs of the head of each `[N, K]`; nats."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    shard = None
    if ranks > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        shard = VocabShard(
            start,
            lambda x: all_reduce(x, dist.ReduceOp.MAX, group),
            lambda x: all_reduce(x, dist.ReduceOp.SUM, group),
        )
    tokens = None
    if head and micro.head is not None:  # of each place of the row; -1 where nothing was sampled
        tokens = micro.head.new_full((*micro.target.shape, micro.head.shape[1]), -1)
        tokens[0, micro.at] = micro.head
    scores = token_log_probs(
        logits,
        micro.target,
        temperature=temperature,
        entropy=entropy,
        head=tokens,
        parallel=shard,
    )
    return TokenScores(
        scores.logp[0][micro.at],
        None if scores.entropy is None else scores.entropy[0][micro.at].detach(),
        None,
        None if scores.head is None else scores.head[0][micro.at],
    )
