"""The text of `scaleup plan`: what `scaleup.memory` found, with what was only assumed."""

from __future__ import annotations

from scaleup import weights
from scaleup.layouts import nodes
from scaleup.memory import (
    GB,
    MEM_FRACTION,
    PROMPT,
    RESERVE_GB,
    SIZE,
    TOKEN_BYTES,
    UNEVEN,
    Plan,
    RankMemory,
)


def table(plan: Plan) -> str:
    """Layout, memory of trainer ranks and engines, tokens of a step, and the limits."""
    world, hf = plan.recipe.world, plan.hf
    at, pool = world.trainer, world.engine
    gpus, experts = world.gpus_per_node, weights.experts(hf)
    where = "on the CPU: no limit is known"
    if gpus:
        total = at.ranks + pool.count * pool.tp
        where = f"{total} GPUs of {world.gpu_gb:g} GB, nodes of {gpus}: {nodes(world)}"
    how = [f"TP{at.tp} PP{at.pp} EP{at.ep}", at.dtype, f"{at.tokens:,} tokens a micro-batch"]
    how += ["full recompute"] * at.recompute
    how += ["Adam on the host (not run here)"] * at.optimizer_offload
    many = f", {experts} experts of which {hf['num_experts_per_tok']} at once" if experts else ""
    lines = [
        f"{world.model}: {plan.parameters:,} parameters{many}",
        f"{at.ranks} to train and {pool.count} x {pool.tp} to sample, {where}",
        "",
        f"Trainer: {', '.join(how)}",
        f"  data parallel {at.ranks // at.pp // at.tp}"
        + (f", of experts {at.ranks // at.pp // at.ep}" if experts else ""),
        *_rows(plan.ranks, world.gpu_gb if gpus else None),
        "",
        *_step(plan),
        "",
        *_engine(plan),
        "",
        f"Assumed, not measured: {RESERVE_GB:g} GB of a GPU for CUDA, NCCL and fragments; the "
        f"fullest rank's experts {UNEVEN:g} times as busy as the mean; prompts of {PROMPT:,} tokens; "
        "parts that do not meet are added. GB are 1e9 bytes.",
    ]
    return "\n".join(lines)


def _rows(ranks: list[RankMemory], limit: float | None) -> list[str]:
    """GB by part, a column for each pipeline stage."""

    def line(name: str, values: list) -> str:
        return f"  {name:<28}" + "".join(f"{value:>16}" for value in values)

    def sizes(values: list[float]) -> list[str]:
        return [f"{value / GB:.3g}" if value < GB else f"{value / GB:.1f}" for value in values]

    lines = [line("ranks", [_span(x) for x in ranks])]
    lines += [line("parameters", [f"{x.parameters:,}" for x in ranks])]
    lines += [line(f"{name}, GB", sizes([x.gpu[name] for x in ranks])) for name in ranks[0].gpu]
    lines.append(line("passes need, GB", sizes([sum(x.gpu.values()) for x in ranks])))
    lines.append(line("Adam's step needs, GB", sizes([x.stepping for x in ranks])))
    if limit:
        lines.append(line("left for the batch, GB", sizes([limit * GB - x.need for x in ranks])))
    for name in ranks[0].host:
        if any(x.host[name] for x in ranks):
            lines.append(line(f"on the host: {name}, GB", sizes([x.host[name] for x in ranks])))
    return lines


def _span(x: RankMemory) -> str:
    return f"{x.ranks[0]}-{x.ranks[-1]}" if len(x.ranks) > 1 else f"{x.ranks[0]}"


def _step(plan: Plan) -> list[str]:
    """Tokens of a step, and how many of them a GPU can hold beside the rest."""
    world, at = plan.recipe.world, plan.recipe.world.trainer
    answers = world.prompts * world.answers
    share = answers * at.tp * at.pp / at.ranks
    lines = [
        f"Step: {world.prompts} x {world.answers} = {answers:,} answers of at most "
        f"{world.max_new_tokens:,} tokens, with prompts up to {answers * plan.longest:,}; "
        f"a micro-batch up to {plan.row:,}"
    ]
    for x in plan.ranks if world.gpus_per_node else []:
        mean = int((world.gpu_gb * GB - x.need) / TOKEN_BYTES / share)
        limit = f"of at most {mean:,} tokens on average" if mean < plan.longest else "of any length"
        lines.append(
            f"  ranks {_span(x)}: the batch takes {TOKEN_BYTES} bytes a token on the GPU, "
            f"which has room for answers {limit}"
        )
    if choices := plan.hf["num_hidden_layers"] * plan.hf.get("num_experts_per_tok", 0):
        small = weights.narrow(weights.experts(plan.hf)).itemsize  # as an engine hands them over
        full = small * choices * answers * plan.longest / GB
        lines.append(
            f"  routed experts on the host: {small * choices:,} bytes a token of a batch ({full:.3g} GB "
            f"at full length), {4 * choices:,} inside an engine"
        )
    return lines


def _engine(plan: Plan) -> list[str]:
    """The rollout pool."""
    world, found = plan.recipe.world, plan.engine
    pool = world.engine
    lines = [
        f"Engines: {pool.count} of TP{pool.tp}, {pool.dtype}; a GPU holds {found.weights / GB:.3g} GB "
        f"of weights and {found.token:,} bytes a cached token"
    ]
    if found.tokens is not None:
        set_here = "mem_fraction_static" in pool.options
        fraction = pool.options.get("mem_fraction_static", MEM_FRACTION)
        lines.append(
            f"  at {fraction:g} of a GPU{'' if set_here else ' (assumed)'} an engine caches "
            f"{found.tokens:,} tokens: {found.answers:,} answers of full length at once, "
            f"{pool.count * found.answers:,} in all engines"
        )
    size = SIZE[world.trainer.dtype] * plan.parameters / GB
    lines.append(
        f"  a push takes {size:.3g} GB of host memory at rank 0, and as much in Ray's store"
    )
    return lines
