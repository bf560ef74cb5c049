"""A dry run of a large model: every parameter, every layout, every shape, without weights or a GPU.

    python -m scaleup.plan      # Qwen3-30B-A3B in four layouts; a minute, less than 2 GB

The Hugging Face model and the Megatron model of every rank of every layout are built on the meta
device, where a tensor is a shape. All ranks take their turn in one process: torch's fake process group
answers for the others. What is checked, and raises PlanError where it does not hold:

    names and shapes of the checkpoint, from transformers, are those of `scaleup.weights`
    every tensor of it is loaded on every rank that needs it, by the loader that trains use
    every number of every Megatron parameter belongs to exactly one tensor of the checkpoint
    the shares of all ranks make up the checkpoint again, and the exporter returns its shapes
    hidden states pass through every layer of the stage, to logits of the expected shape
    the loss path runs at the true width of a vocabulary shard, with real numbers and its gradient

A shape is not a number: that weights land where they should is the round trip of tests/scaleup, and
that a layout fits into memory is arithmetic here (`Memory`), not a measurement.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scaleup import weights
from scaleup.model import Layout, build, pack, parallel_state, start
from scaleup.qwen import QWEN3_30B_A3B
from scaleup.train import Response, collate
from simlab.aggregate import token_mean
from simlab.fused import terms
from simlab.logits import VocabShard, token_log_probs
from simlab.stabilizers import Stabilizer, bind

LAYOUTS = (  # layout, ranks
    (Layout(tp=4, ep=4), 4),
    (Layout(tp=4, ep=8), 8),
    (Layout(tp=1, ep=8), 8),
    (Layout(tp=4, pp=2, ep=4), 8),
)
NO_DRAWS = dict.fromkeys(("init_method", "output_layer_init_method"), lambda weight: weight)
LENGTHS = (4096,) * 5  # tokens of the sequences of one micro-batch


class PlanError(ValueError):
    """Something that does not fit; the message is one sentence."""


class Memory(NamedTuple):
    """Bytes of the fullest rank: bf16 weights, fp32 gradients, and Adam's fp32 copy and moments."""

    weights: float
    gradients: float
    adam: float  # shared by the ranks that hold the same parameter
    logits: float  # bf16 [tokens, V/TP] of one micro-batch, and as much again for their gradient


class LayoutPlan(NamedTuple):
    layout: Layout
    world: int
    parameters: list[int]  # of each rank
    memory: Memory
    shapes: dict[str, tuple[int, ...]]  # what was walked, stage by stage


class Plan(NamedTuple):
    parameters: int
    tensors: int
    layouts: list[LayoutPlan]


def dry_run(
    hf: dict = QWEN3_30B_A3B,
    layouts: Sequence[tuple[Layout, int]] = LAYOUTS,
    lengths: Sequence[int] = LENGTHS,
    stabilizer: Stabilizer | None = None,
) -> Plan:
    """Check a model in every layout; sequences of `lengths` are the micro-batch that is walked.

    Raises PlanError in one sentence, and RuntimeError where torch.distributed is in use.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a torch.distributed group")
    names = checkpoint(hf)
    if names != (ours := weights.names(hf)):
        odd = min(names.items() ^ ours.items())[0]
        raise PlanError(f"plan: {odd} is {names.get(odd)} in transformers, {ours.get(odd)} here")
    found = [check_layout(hf, *each, lengths, stabilizer or bind("sat")) for each in layouts]
    return Plan(sum(map(math.prod, names.values())), len(names), found)


def checkpoint(hf: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers would save, from its model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    tensors = revert_weight_conversion(
        model, model.state_dict()
    )  # experts are one tensor in memory
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if hf.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes


@contextmanager
def as_rank(rank: int, layout: Layout, world: int) -> Iterator[None]:
    """Be one rank of a world that is not there. Collectives return at once, shapes are right."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        start(layout, create_gloo_process_groups=False)  # the fake store has no gloo
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def check_layout(
    hf: dict, layout: Layout, world: int, lengths: Sequence[int], stabilizer: Stabilizer
) -> LayoutPlan:
    """All ranks of one layout. Raises PlanError."""
    names = weights.names(hf)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
    if hf.get("tie_word_embeddings"):  # the loader reads this one, to compare it with the head
        embedding = "model.embed_tokens.weight"
        tensors[embedding] = torch.zeros(()).expand(names[embedding])
    holders, sizes, memories, shapes = Counter(), [], [], {}
    for rank in range(world):
        with as_rank(rank, layout, world):
            model = build(hf, layout, dtype=torch.bfloat16, device="meta", **NO_DRAWS)
            weights.load(model, tensors)
            holders.update(shares(model, layout))
            parameters = weights.local_parameters(model)
            sizes.append(sum(p.numel() for p in parameters.values()))
            memories.append(
                _memory(parameters, layout, world, lengths, hf["vocab_size"] // layout.tp)
            )
            if rank % (world // layout.pp) == 0:  # the first rank of a stage
                shapes |= walk_model(model, layout, lengths)
            if rank == 0 and layout.pp == 1:  # the fake group cannot tell what another stage holds
                exported = {name: tuple(x.shape) for name, x in weights.export(model)}
                if exported != names:
                    odd = min(exported.items() ^ names.items())[0]
                    raise PlanError(f"plan: {layout} exports {odd} as {exported.get(odd)}")
        del model, parameters
        gc.collect()
    for name in names:
        expected = world // layout.pp // (layout.ep if _is_expert(name) else 1)
        if holders[name] != expected:
            raise PlanError(f"plan: {layout}, {holders[name]} ranks hold {name}, not {expected}")
    shapes |= walk_loss(hf["vocab_size"], layout.tp, stabilizer)
    fullest = Memory(*(max(x) for x in zip(*memories, strict=True)))
    return LayoutPlan(layout, world, sizes, fullest, shapes)


def shares(model: torch.nn.Module, layout: Layout) -> list[str]:
    """Tensors of the checkpoint that this rank holds a share of (or all).

    Raises PlanError unless they fill each parameter of the model exactly once, in shares of 1/TP
    where the tensor is split.
    """
    hf, parameters = model.hf, weights.local_parameters(model)
    found, parts = [], {name: [] for name in parameters}
    for slot in weights.rules(hf, layout.tp):
        if slot.megatron in parameters:
            part = slot.view(parameters[slot.megatron])
            split = 1 if slot.axis is None else layout.tp
            if slot.axis is not None and slot.shape[slot.axis] % split:
                raise PlanError(f"plan: {slot.hf} {slot.shape} has no {split} equal shares")
            if part.numel() * split != math.prod(slot.shape):
                raise PlanError(f"plan: {slot.megatron} holds {part.numel()} numbers of {slot.hf}")
            parts[slot.megatron].append(part)
            found.append(slot.hf)
    for name, views in parts.items():
        if name == "output_layer.weight" and hf.get("tie_word_embeddings"):
            continue  # the last stage's copy of the embedding
        starts = {view.storage_offset() for view in views}
        if len(starts) < len(views) or sum(map(Tensor.numel, views)) != parameters[name].numel():
            raise PlanError(f"plan: {name} is not filled exactly once by the checkpoint")
    return found


def walk_model(
    model: torch.nn.Module, layout: Layout, lengths: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Shapes on the way from token ids, or from the stage before, to logits or the next stage.

    Every layer of the stage is run on the meta device: norms, attention, router, and its first expert,
    with as many rows as it gets when all are chosen equally often. Only the dispatcher between router
    and experts is left out, because it asks for numbers. Raises PlanError.
    """
    config, seen = model.config, {}
    batch = pack([torch.zeros(n, dtype=torch.int64) for n in lengths], layout.tp)
    T, t = batch.tokens.shape[1], batch.tokens.shape[1] // layout.tp
    stage = f"stage {parallel_state.get_pipeline_model_parallel_rank()}"
    h, E, k = config.hidden_size, config.num_moe_experts, config.moe_router_topk

    def must(name: str, x: Tensor, *shape: int) -> Tensor:
        seen[f"{stage}: {name}"] = tuple(x.shape)
        if tuple(x.shape) != shape:
            raise PlanError(f"plan: {layout}, {stage}, {name} is {tuple(x.shape)}, not {shape}")
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
    vocabulary stands for all of them, so the numbers mean nothing. Raises PlanError.
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
    found = [terms(stabilizer, token_mean, True, b, **stats) for _, b in pairs]
    count = sum(x.count for x in found)
    for x in found:
        _must("loss terms", x.total, (), torch.float32, seen)
    (-sum(x.total for x in found) / count).backward()
    for logits, _ in pairs:
        _must("gradient", logits.grad, tuple(logits.shape), torch.bfloat16, seen)
        if not (torch.isfinite(logits.grad).all() and logits.grad.any()):
            raise PlanError("plan: the loss has no finite gradient with respect to the logits")
    return seen


def _must(name: str, x: Tensor, shape: tuple, dtype: torch.dtype, seen: dict) -> None:
    seen[f"loss: {name}"] = tuple(x.shape)
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise PlanError(f"plan: {name} is {x.dtype} {tuple(x.shape)}, not {dtype} {shape}")


def _is_expert(name: str) -> bool:
    return ".experts." in name or ".local_experts." in name


def _memory(
    parameters: dict[str, Tensor], layout: Layout, world: int, lengths: Sequence[int], columns: int
) -> Memory:
    experts = sum(p.numel() for name, p in parameters.items() if _is_expert(name))
    dense = sum(p.numel() for p in parameters.values()) - experts
    replicas = world // layout.pp // layout.tp, world // layout.pp // layout.ep
    adam = 12 * (dense / replicas[0] + experts / replicas[1])
    return Memory(
        2.0 * (dense + experts), 4.0 * (dense + experts), adam, 2.0 * sum(lengths) * columns
    )


def table(plan: Plan) -> str:
    """The plan in Markdown."""
    lines = [
        f"{plan.parameters:,} parameters in {plan.tensors:,} tensors.",
        "",
        "| layout | ranks | parameters of a rank | weights GB | gradients GB | Adam GB | logits GB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for x in plan.layouts:
        sizes = " to ".join(f"{n:,}" for n in sorted({min(x.parameters), max(x.parameters)}))
        memory = " | ".join(f"{n / 1e9:.1f}" for n in x.memory)
        lines.append(f"| {x.layout} | {x.world} | {sizes} | {memory} |")
    for x in plan.layouts:
        lines += ["", f"Shapes walked in {x.layout}:", ""]
        lines += [f"- {name} `{list(shape)}`" for name, shape in x.shapes.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(dry_run()))
