"""The text of `scaleup plan`: what `scaleup.plan.memory` found, with what was only assumed."""

from __future__ import annotations

from scaleup.models import families
from scaleup.plan.host_memory import LENGTH, response, routing, sample
from scaleup.plan.layouts import nodes
from scaleup.plan.memory import (
    GB,
    HEAD_BYTES,
    MEM_FRACTION,
    PROMPT,
    RESERVE_GB,
    TOKEN_BYTES,
    UNEVEN,
    Plan,
    fits,
)
from scaleup.plan.sizes import HostMemory, RankMemory
from scaleup.recipe import Recipe


def plan(recipe: Recipe, available: int | None = None) -> str:
    """The text of `scaleup plan`. Raises ConfigError as `fits`."""
    return table(fits(recipe, available))


def table(plan: Plan) -> str:
    """Layout, memory of trainer ranks and engines, tokens of a step, and the limits."""
    world, hf = plan.recipe.world, plan.hf
    spec, pool = world.trainer, world.engine
    gpus, experts = world.gpus_per_node, families.experts(hf)
    where = "on the CPU: no limit is known"
    if gpus:
        total = spec.ranks + pool.count * pool.tp
        where = f"{total} GPUs of {world.gpu_gb:g} GB, nodes of {gpus}: {nodes(world)}"
    settings = [
        f"TP{spec.tp} PP{spec.pp} EP{spec.ep}",
        spec.dtype,
        f"{spec.tokens:,} tokens a micro-batch",
    ]
    settings += ["full recompute"] * spec.recompute
    settings += ["Adam on the host (not run here)"] * spec.optimizer_offload
    many = f", {experts} experts of which {hf['num_experts_per_tok']} at once" if experts else ""
    lines = [
        f"{world.model}: {plan.parameters:,} parameters{many}",
        f"{spec.ranks} to train and {pool.count} x {pool.tp} to sample, {where}",
        "",
        f"Trainer: {', '.join(settings)}",
        f"  data parallel {spec.ranks // spec.pp // spec.tp}"
        + (f", of experts {spec.ranks // spec.pp // spec.ep}" if experts else ""),
        *_rows(plan.ranks, world.gpu_gb if gpus else None),
        "",
        *_step(plan),
        "",
        *_engine(plan),
        "",
        *_hosts(plan),
        "",
        f"Assumed, not measured: {RESERVE_GB:g} GB of a GPU for CUDA, NCCL and fragments; the "
        f"fullest rank's experts {UNEVEN:g} times as busy as the mean; prompts of {PROMPT:,} tokens; "
        "parts of a GPU that never coexist are summed anyway. GB are 1e9 bytes.",
    ]
    return "\n".join(lines)


def _rows(ranks: list[RankMemory], limit: float | None) -> list[str]:
    """GB by part, a column for each pipeline stage."""

    lines = [_line("ranks", [_span(x) for x in ranks])]
    lines += [_line("parameters", [f"{x.parameters:,}" for x in ranks])]
    lines += [_line(f"{name}, GB", _sizes([x.gpu[name] for x in ranks])) for name in ranks[0].gpu]
    lines.append(_line("passes need, GB", _sizes([sum(x.gpu.values()) for x in ranks])))
    lines.append(_line("Adam's step needs, GB", _sizes([x.stepping for x in ranks])))
    if limit:
        lines.append(_line("left for the batch, GB", _sizes([limit * GB - x.need for x in ranks])))
    return lines


def _line(name: str, values: list, width: int = 28) -> str:
    return f"  {name:<{width}}" + "".join(f"{value:>16}" for value in values)


def _sizes(values: list[float]) -> list[str]:
    return [f"{value / GB:.3g}" if value < GB else f"{value / GB:.1f}" for value in values]


def _span(x: RankMemory) -> str:
    return f"{x.ranks[0]}-{x.ranks[-1]}" if len(x.ranks) > 1 else f"{x.ranks[0]}"


def _step(plan: Plan) -> list[str]:
    """Tokens of a step, and how many of them a GPU can hold beside the rest."""
    world, spec = plan.recipe.world, plan.recipe.world.trainer
    answers = world.prompts * world.answers
    share = answers * spec.tp * spec.pp / spec.ranks
    lines = [
        f"Step: {world.prompts} x {world.answers} = {answers:,} answers of at most "
        f"{world.max_new_tokens:,} tokens, with prompts up to {answers * plan.longest:,}; "
        f"a micro-batch up to {plan.row:,}"
    ]
    head = plan.recipe.head
    each = TOKEN_BYTES + HEAD_BYTES * head
    for x in plan.ranks if world.gpus_per_node else []:
        mean = int((world.gpu_gb * GB - x.need) / each / share)
        limit = f"of at most {mean:,} tokens on average" if mean < plan.longest else "of any length"
        lines.append(
            f"  ranks {_span(x)}: the batch takes {each:,} bytes a token on the GPU, "
            f"which has room for answers {limit}"
        )
    for replay in world.replay:
        full = plan.hf, plan.longest, world.max_new_tokens, replay, head
        lines.append(
            f"  replay {replay}: an answer of full length takes {sample(*full) / 1e6:.3g} MB in the "
            f"controller and {response(*full) / 1e6:.3g} MB in a batch"
        )
        if replay == "r3":
            lines[-1] += f", {routing(plan.hf):,} bytes a token of it routed experts"
    if head:
        lines.append(
            f"  head of {head}: {8 * head:,} bytes a sampled token in the controller, {12 * head:,} in a batch "
            f"and, before compression, in the token log"
        )
    return lines


def _engine(plan: Plan) -> list[str]:
    """The rollout pool."""
    world, engine = plan.recipe.world, plan.engine
    pool = world.engine
    lines = [
        f"Engines: {pool.count} of TP{pool.tp}, {pool.dtype}; a GPU holds {engine.weights / GB:.3g} GB "
        f"of weights and {engine.token:,} bytes a cached token"
    ]
    if engine.tokens is not None:
        set_here = "mem_fraction_static" in pool.options
        fraction = pool.options.get("mem_fraction_static", MEM_FRACTION)
        lines.append(
            f"  at {fraction:g} of a GPU{'' if set_here else ' (assumed)'} an engine caches "
            f"{engine.tokens:,} tokens: {engine.answers:,} answers of full length at once, "
            f"{pool.count * engine.answers:,} in all engines"
        )
    return lines


def _hosts(plan: Plan) -> list[str]:
    """GB of the host, two columns for each kind of node."""
    pairs, seen = [], []
    for pair in zip(plan.hosts, plan.shorter, strict=True):
        if pair[0] in seen:
            continue
        seen.append(pair[0])
        pairs.append((pair, plan.hosts.count(pair[0])))
    both = [x for pair, _ in pairs for x in pair]

    def rows(part, indent: str = "") -> list[str]:
        columns = [part(x) for x in both]
        return [
            _line(f"{indent}{name}, GB", _sizes([x[name] for x in columns]), 44)
            for name in columns[0]
            if any(x[name] for x in columns)
        ]

    lines = [f"Host memory of a node, answers at full length and at {LENGTH:g} of it (assumed)"]
    heads, lengths = [], []
    for (x, _), n in pairs:
        heads += [_node(x, n), ""]
        lengths += ["full", f"{LENGTH:g}"]
    lines += [_line("", heads, 44).rstrip(), _line("length", lengths, 44)]
    lines += rows(lambda x: x.always)
    for moment in both[0].moments:
        if inside := rows(lambda x, moment=moment: x.moments[moment], "  "):
            lines += [f"  during {moment}:", *inside]
    lines.append(_line("needed at the fullest moment, GB", _sizes([x.need for x in both]), 44))
    lines.append(_line("of it at most in Ray's store, GB", _sizes([x.store for x in both]), 44))
    return lines


def _node(x: HostMemory, n: int) -> str:
    parts = [f"{x.ranks} ranks"] * bool(x.ranks) + [f"{x.engines} eng."] * bool(x.engines)
    return f"{n} x " * (n > 1) + " ".join(parts)
