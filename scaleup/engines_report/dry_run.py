"""A dry run of a large model: every parameter, every layout, every shape, without weights or a GPU.

    python -m scaleup.engines_report.dry_run      # Qwen3-30B-A3B in four layouts; a minute, less than 2 GB

The Hugging Face model and the Megatron model of every rank of every layout are built on the meta
device, where a tensor is a shape. All ranks take their turn in one process: torch's fake process group
answers for the others. What is checked, and raises DryRunError where it does not hold:

    names and shapes of the checkpoint, from transformers, are those of `scaleup.models.weights`
    every tensor of it is loaded on every rank that needs it, by the loader that trains use
    every number of every Megatron parameter belongs to exactly one tensor of the checkpoint
    every rank has as many parameters, dense and of experts, as `scaleup.plan.memory` counts
    the shares of all ranks make up the checkpoint again, and the exporter returns its shapes
    hidden states pass through every layer of the stage, to logits of the expected shape
    the loss path runs at the true width of a vocabulary shard, with real numbers and its gradient

A shape is not a number: that weights land where they should is the round trip of tests/scaleup. The
bytes in the table are those of `scaleup.plan.memory`, which has the one arithmetic of memory.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scaleup.engines_report.walk import DryRunError, walk_loss, walk_model
from scaleup.models import slots, weights
from scaleup.models.megatron import Layout, build, parallel_state, start
from scaleup.models.qwen import QWEN3_30B_A3B
from scaleup.plan import memory
from scaleup.world import TrainerSpec
from simlab.stabilizers import Stabilizer, bind

LAYOUTS = (  # layout, ranks
    (Layout(tp=4, ep=4), 4),
    (Layout(tp=4, ep=8), 8),
    (Layout(tp=1, ep=8), 8),
    (Layout(tp=4, pp=2, ep=4), 8),
)
NO_DRAWS = dict.fromkeys(("init_method", "output_layer_init_method"), lambda weight: weight)
LENGTHS = (4096,) * 5  # tokens of the sequences of one micro-batch


class LayoutRun(NamedTuple):
    """What was found in one layout."""

    layout: Layout
    world: int
    parameters: list[int]  # of each rank
    memory: dict[str, float]  # bytes of the fullest rank, by part, in bfloat16
    shapes: dict[str, tuple[int, ...]]  # what was walked, stage by stage


class DryRun(NamedTuple):
    """What was found in all of them."""

    parameters: int
    tensors: int
    layouts: list[LayoutRun]


def dry_run(
    hf: dict = QWEN3_30B_A3B,
    layouts: Sequence[tuple[Layout, int]] = LAYOUTS,
    lengths: Sequence[int] = LENGTHS,
    stabilizer: Stabilizer | None = None,
) -> DryRun:
    """Check a model in every layout; sequences of `lengths` are the micro-batch that is walked.

    Raises DryRunError in one sentence, and RuntimeError where torch.distributed is in use.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a torch.distributed group")
    names = checkpoint(hf)
    if names != (ours := slots.names(hf)):
        odd = min(names.items() ^ ours.items())[0]
        raise DryRunError(
            f"dry run: {odd} is {names.get(odd)} in transformers, {ours.get(odd)} here"
        )
    runs = [check_layout(hf, *each, lengths, stabilizer or bind("sat")) for each in layouts]
    return DryRun(sum(map(math.prod, names.values())), len(names), runs)


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
) -> LayoutRun:
    """All ranks of one layout. Raises DryRunError."""
    names = slots.names(hf)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
    if hf.get("tie_word_embeddings"):  # the loader reads this one, to compare it with the head
        embedding = "model.embed_tokens.weight"
        tensors[embedding] = torch.zeros(()).expand(names[embedding])
    counted = memory.parameters(hf, layout.tp, layout.pp, layout.ep)
    holders, sizes, shapes = Counter(), [], {}
    for rank in range(world):
        with as_rank(rank, layout, world):
            model = build(hf, layout, dtype=torch.bfloat16, device="meta", **NO_DRAWS)
            weights.load(model, tensors)
            holders.update(shares(model, layout))
            dense, experts = count(model)
            sizes.append(dense + experts)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            if (dense, experts) != counted[stage]:
                raise DryRunError(
                    f"dry run: {layout}, rank {rank} has {dense} parameters and {experts} of experts, "
                    f"scaleup plan counts {counted[stage]}"
                )
            if rank % (world // layout.pp) == 0:  # the first rank of a stage
                shapes |= walk_model(model, layout, lengths)
            if rank == 0 and layout.pp == 1:  # the fake group cannot tell what another stage holds
                exported = {name: tuple(x.shape) for name, x in weights.export(model)}
                if exported != names:
                    odd = min(exported.items() ^ names.items())[0]
                    raise DryRunError(f"dry run: {layout} exports {odd} as {exported.get(odd)}")
        del model
        gc.collect()
    for name in names:
        expected = world // layout.pp // (layout.ep if _is_expert(name) else 1)
        if holders[name] != expected:
            raise DryRunError(
                f"dry run: {layout}, {holders[name]} ranks hold {name}, not {expected}"
            )
    shapes |= walk_loss(hf["vocab_size"], layout.tp, stabilizer)
    spec = TrainerSpec(ranks=world, tp=layout.tp, pp=layout.pp, ep=layout.ep, dtype="bfloat16")
    stages = [memory.state(*each, spec) for each in counted]
    fullest = {name: max(stage[name] for stage in stages) for name in stages[0]}
    fullest["logits"] = memory.logits(hf, sum(lengths), spec)
    return LayoutRun(layout, world, sizes, fullest, shapes)


def count(model: torch.nn.Module) -> tuple[int, int]:
    """Parameters of this rank: dense, and of experts."""
    sizes = {name: p.numel() for name, p in weights.local_parameters(model).items()}
    experts = sum(size for name, size in sizes.items() if _is_expert(name))
    return sum(sizes.values()) - experts, experts


def shares(model: torch.nn.Module, layout: Layout) -> list[str]:
    """Tensors of the checkpoint that this rank holds a share of (or all).

    Raises DryRunError unless they fill each parameter of the model exactly once, in shares of 1/TP
    where the tensor is split.
    """
    hf, parameters = model.hf, weights.local_parameters(model)
    filled, parts = [], {name: [] for name in parameters}
    for slot in slots.rules(hf, layout.tp):
        if slot.megatron in parameters:
            part = slot.view(parameters[slot.megatron])
            split = 1 if slot.axis is None else layout.tp
            if slot.axis is not None and slot.shape[slot.axis] % split:
                raise DryRunError(f"dry run: {slot.hf} {slot.shape} has no {split} equal shares")
            if part.numel() * split != math.prod(slot.shape):
                raise DryRunError(
                    f"dry run: {slot.megatron} holds {part.numel()} numbers of {slot.hf}"
                )
            parts[slot.megatron].append(part)
            filled.append(slot.hf)
    for name, views in parts.items():
        if name == "output_layer.weight" and hf.get("tie_word_embeddings"):
            continue  # the last stage's copy of the embedding
        starts = {view.storage_offset() for view in views}
        if len(starts) < len(views) or sum(map(Tensor.numel, views)) != parameters[name].numel():
            raise DryRunError(f"dry run: {name} is not filled exactly once by the checkpoint")
    return filled


def _is_expert(name: str) -> bool:
    return ".experts." in name or ".local_experts." in name


def table(run: DryRun) -> str:
    """The result in Markdown."""
    lines = [
        f"{run.parameters:,} parameters in {run.tensors:,} tensors.",
        "",
        "| layout | ranks | parameters of a rank | weights GB | gradients GB | Adam GB | logits GB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for x in run.layouts:
        sizes = " to ".join(f"{n:,}" for n in sorted({min(x.parameters), max(x.parameters)}))
        parts = " | ".join(f"{size / memory.GB:.1f}" for size in x.memory.values())
        lines.append(f"| {x.layout} | {x.world} | {sizes} | {parts} |")
    for x in run.layouts:
        lines += ["", f"Shapes walked in {x.layout}:", ""]
        lines += [f"- {name} `{list(shape)}`" for name, shape in x.shapes.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(dry_run()))
