"""The way of shapes through a model of `scaleup.models.megatron`, and through a loss.

walk_model(model, layout, lengths)      # on the meta device: every layer of this rank's stage
walk_loss(vocab, tp, stabilizer)        # with real numbers on the CPU: from logits to their gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scaleup.models.megatron import Layout, parallel_state
from scaleup.models.packing import pack
from scaleup.trainer.trainer import Response, collate
from simlab.core.aggregate import token_mean
from simlab.core.logits import VocabShard, token_log_probs
from simlab.stabilizers import Stabilizer
from simlab.stabilizers.fused import terms


class DryRunError(ValueError):
    """Something that does not fit; the message is one sentence."""


def walk_model(
    model: torch.nn.Module, layout: Layout, lengths: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Shapes on the way from token ids, or from the stage before, to logits or the next stage.

    Every layer of the stage is run on the meta device: norms, attention, router, and its first expert,
    with as many rows as it gets when all are chosen equally often. Only the dispatcher between router
    and experts is left out, because it asks for numbers. Raises DryRunError.
    """
    config, seen = model.config, {}
    batch = pack([torch.zeros(n, dtype=torch.int64) for n in lengths], layout.tp)
    T, t = batch.tokens.shape[1], batch.tokens.shape[1] // layout.tp
    stage = f"stage {parallel_state.get_pipeline_model_parallel_rank()}"
    h, E, k = config.hidden_size, config.num_moe_experts, config.moe_router_topk

    def must(name: str, x: Tensor, *shape: int) -> Tensor:
        seen[f"{stage}: {name}"] = tuple(x.shape)
        if tuple(x.shape) != shape:
            raise DryRunError(
                f"dry run: {layout}, {stage}, {name} is {tuple(x.shape)}, not {shape}"
            )
        return x

    with torch.device("meta"), torch.no_grad():
        x = torch.empty(t, 1, h, dtype=config.params_dtype)
        if model.pre_process:
            x = model.embedding(batch.tokens.to("meta"), batch.positions.to("meta"))
        must("hidden states", x, t, 1, h)
        turn = must("rotary", model.rotary_pos_emb(T, packed_seq=True), T, 1, 1, config.kv_channels)
        for layer in model.decoder.layers:
            y, _ = layer.self_attention(
                layer.input_layernorm(x), None, rotary_pos_emb=turn, packed_seq_params=batch.params
            )
            x = x + must("attention", y, t, 1, h)
            y = layer.pre_mlp_layernorm(x)
            if E is None:
                x = x + must("mlp", layer.mlp(y)[0], t, 1, h)
                continue
            scores, chosen = layer.mlp.router(y)
            must("router scores", scores, t, E)
            must("router choice", chosen, t, E)
            experts = layer.mlp.experts.local_experts
            # t k rows leave every rank of the expert group, and as many arrive
            rows = max(t * k // len(experts), 1)
            must("expert", experts[0](torch.empty(rows, h, dtype=x.dtype))[0], rows, h)
        if model.post_process:
            x = model.decoder.final_layernorm(x)
            tied = model.share_embeddings_and_output_weights
            head = model.shared_embedding_or_output_weight() if tied else None
            logits, _ = model.output_layer(x, weight=head)
            must("logits", logits.transpose(0, 1), 1, T, model.vocab_size // layout.tp)
    return seen


def walk_loss(
    vocab: int, tp: int, stabilizer: Stabilizer, tokens: int = 64
) -> dict[str, tuple[int, ...]]:
    """Shapes from bf16 logits `[1, T, V/TP]` to the loss and back, with real numbers on the CPU.

    Two micro-batches of a few responses; the whole-batch numbers are those of both. One shard of the
    vocabulary stands for all of them, so the numbers mean nothing. Raises DryRunError.
    """
    columns, seen, pairs = vocab // tp, {}, []
    draw = torch.Generator().manual_seed(0)
    sizes = [tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4]
    for _ in range(2):
        sequences = [torch.randint(columns, (n + 1,), generator=draw) for n in sizes]
        responses = [
            Response(s, 1, -torch.rand(len(s) - 1, generator=draw) - 8, (-1.0) ** i)
            for i, s in enumerate(sequences)
        ]
        micro = collate(responses, tp)
        T, N = micro.target.shape[1], len(micro.at)
        logits = torch.randn(1, T, columns, generator=draw).bfloat16().requires_grad_()
        shard = VocabShard(0, lambda x: x, lambda x: x) if tp > 1 else None
        scores = token_log_probs(logits, micro.target, entropy=True, parallel=shard)
        for name in ("logp", "entropy"):
            _must(name, getattr(scores, name), (1, T), torch.float32, seen)
        logp = scores.logp[0][micro.at]
        pairs.append((logits, replace(micro.b, logp=logp)))
        for name in ("logp", "logp_mu", "advantage"):
            _must(f"batch {name}", getattr(pairs[-1][1], name), (N,), torch.float32, seen)
    stats = stabilizer.stats([b for _, b in pairs])
    for name, value in stats.items():
        _must(name, torch.as_tensor(value), (), torch.float32, seen)
    sums = [terms(stabilizer, token_mean, True, b, **stats) for _, b in pairs]
    for x in sums:
        _must("loss terms", x.total, (), torch.float32, seen)
    (-sum(x.total for x in sums) / sum(x.count for x in sums)).backward()
    for logits, _ in pairs:
        _must("gradient", logits.grad, tuple(logits.shape), torch.bfloat16, seen)
        if not (torch.isfinite(logits.grad).all() and logits.grad.any()):
            raise DryRunError("dry run: the loss has no finite gradient with respect to the logits")
    return seen


def _must(name: str, x: Tensor, shape: tuple, dtype: torch.dtype, seen: dict) -> None:
    seen[f"loss: {name}"] = tuple(x.shape)
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise DryRunError(f"dry run: {name} is {x.dtype} {tuple(x.shape)}, not {dtype} {shape}")
