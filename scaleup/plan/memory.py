"""What a recipe needs, from its config.json alone: no weights, no GPU, no Megatron, no engine.

    plan(load("qwen3_30b_a3b"))     # the text of `scaleup plan`
    fits(load("qwen3_30b_a3b"))     # the numbers; ConfigError in one sentence where they are too large

Counted, and held against models that were built (tests/scaleup/test_memory.py):

    weights       2 or 4 bytes a parameter of the rank, by dtype
    gradients     float32
    Adam          two float32 moments and, for bfloat16 weights, a float32 copy; cut over the ranks
                  that hold the same parameter: ranks / (TP PP), for experts ranks / (PP EP)
    kept          what the backward pass needs of a micro-batch: the inputs of the layers with
                  `recompute`, else what autograd saves; of up to PP micro-batches in a pipeline
    logits        [tokens, V / TP] in the dtype of the weights and their gradient, both whole; the
                  rest of `simlab.core.logits` is a few blocks
    batch         fields of all tokens of a step: on the GPU as long as the step takes

The host of each node is `scaleup.plan.host_memory`'s.

Assumed, not measured; the constants below, and marked in what is printed:

    a GPU         RESERVE_GB for CUDA, NCCL and fragments; 1 GB is 1e9 bytes
    a layer       that runs takes twice its tensors (values and gradients), with the experts of a
                  rank UNEVEN times as busy as the mean; one kernel an RMSNorm, attention without scores
    Adam's step   takes one float32 temporary, torch's; Transformer Engine and Apex need none
    a prompt      has PROMPT tokens at most
    an engine     fills MEM_FRACTION of its GPU where `mem_fraction_static` is not set
    sums          parts that never coexist (logits, the layer that runs) are summed anyway

`optimizer_offload` has not been run: Megatron's moves from a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scaleup.models import families, slots
from scaleup.plan.host_memory import LENGTH, OFFLOADED, SIZE, hosts
from scaleup.plan.layouts import check, config, context, nodes
from scaleup.plan.sizes import EngineMemory, HostMemory, RankMemory
from scaleup.recipe import Recipe
from scaleup.world import EngineWorld, TrainerSpec
from simlab.core.logits import DEVICE_BLOCK_BYTES
from simlab.study.specs import regime
from simlab.study.strict import ConfigError

GB = 1e9
RESERVE_GB, UNEVEN, PROMPT, MEM_FRACTION = 4.0, 2.0, 1024, 0.85
RAY_STORE = 0.3  # of a node's memory, Ray's default for its object store
TOKEN_BYTES = 78  # ids, places, positions, log-probs, ages and masks of a token of the step
HEAD_BYTES = 16  # of one entry of its head: an id and its log-probs under both policies


@dataclass(frozen=True)
class Plan:
    """What `fits` found."""

    recipe: Recipe
    hf: dict
    parameters: int
    longest: int  # tokens of a prompt and its answer, at most
    row: int  # tokens of a micro-batch, at most
    ranks: list[RankMemory]  # by pipeline stage
    engine: EngineMemory
    hosts: list[HostMemory]  # by node, answers at full length
    shorter: list[HostMemory]  # the same, answers and prompts of LENGTH as many tokens


def parameters(hf: dict, tp: int = 1, pp: int = 1, ep: int = 1) -> list[tuple[int, int]]:
    """(dense, expert) parameters of a rank of each pipeline stage."""
    layers, experts = hf["num_hidden_layers"] // pp, families.experts(hf) // ep
    counts = [[0, 0] for _ in range(pp)]
    for slot in slots.rules(hf, tp):
        words = slot.megatron.split(".")
        is_expert = "local_experts" in words
        if is_expert and int(words[words.index("local_experts") + 1]) >= experts:
            continue  # of another rank, which holds as many
        inside = words[1] == "layers"
        stage = int(words[2]) // layers if inside else -(words[0] != "embedding")
        counts[stage][is_expert] += math.prod(slot.shape) // (1 if slot.axis is None else tp)
    if hf.get("tie_word_embeddings") and pp > 1:  # the last stage has a copy
        counts[-1][0] += hf["vocab_size"] * hf["hidden_size"] // tp
    return [tuple(x) for x in counts]


def state(dense: int, experts: int, spec: TrainerSpec) -> dict[str, float]:
    """Bytes of weights, gradients and Adam's numbers on a rank with so many parameters; Adam on the GPU."""
    size, count = SIZE[spec.dtype], dense + experts
    adam = (8 if size == 4 else 12) * shard(dense, experts, spec)
    return {"weights": size * count, "gradients": 4 * count, "Adam": adam}


def shard(dense: int, experts: int, spec: TrainerSpec) -> float:
    """Parameters of a rank that Adam updates there: its share among the ranks that hold the same ones."""
    ranks = spec.ranks // spec.pp
    return dense * spec.tp / ranks + experts * spec.ep / ranks


def logits(hf: dict, row: int, spec: TrainerSpec) -> float:
    """Bytes of the logits of `row` tokens, of their gradient, and of the blocks they are worked on in."""
    return 2 * SIZE[spec.dtype] * row * hf["vocab_size"] / spec.tp + 2 * DEVICE_BLOCK_BYTES


def layer(hf: dict, row: int, tp: int, size: int, uneven: float = 1.0) -> float:
    """Bytes that autograd keeps of one layer on a rank; `row` tokens of `size` bytes a number."""
    h, d, q = hf["hidden_size"], families.head_dim(hf), hf["num_attention_heads"]
    g = families.kv_heads(hf)
    # q k v; turned q and k; the result twice; with a norm, queries before it. Sines and cosines
    heads = (q + 2 * g) + (q + g) + 2 * q + q * families.family(hf).qk_norm
    attention = row * (size * heads * d + 4 * q) / tp + row * size * 4 * d
    attention += 4 * size * h * row / tp  # the norms' inputs and outputs
    if E := families.experts(hf):
        k, f = hf["num_experts_per_tok"], hf["moe_intermediate_size"]
        return attention + (size * uneven * k * (h + 6 * f) + 5 * E + 24 * k) * row / tp
    return attention + 5 * size * hf["intermediate_size"] * row / tp


def largest_row(world: EngineWorld, spec: TrainerSpec, longest: int) -> int:
    """Tokens of the largest micro-batch, as TrainerSpec.tokens promises it."""
    share = math.ceil(world.prompts * world.answers * spec.tp * spec.pp / spec.ranks) * longest
    return math.ceil(max(min(spec.tokens, share), longest) / spec.tp) * spec.tp


def trainer(recipe: Recipe, hf: dict, spec: TrainerSpec, longest: int) -> list[RankMemory]:
    """A rank of each pipeline stage of the trainer `spec`."""
    world, size, memories = recipe.world, SIZE[spec.dtype], []
    row, layers = largest_row(world, spec, longest), hf["num_hidden_layers"] // spec.pp
    oldest = max(regime(lag).largest_age for lag in recipe.lags)
    copies = bool(recipe.training.kl_coef) + spec.keep_weights * (oldest + 1)
    copies += copies > 0  # the present weights, set aside
    replayed = any(replay != "none" for replay in world.replay)
    routes = 8 * layers * hf.get("num_experts_per_tok", 0) * row / spec.tp * replayed  # int64
    kept = layer(hf, row, spec.tp, size)
    if spec.recompute:
        kept = size * hf["hidden_size"] * row / spec.tp
    for stage, (dense, experts) in enumerate(parameters(hf, spec.tp, spec.pp, spec.ep)):
        updated = shard(dense, experts, spec)
        gpu = state(dense, experts, spec) | ({"Adam": 0} if spec.optimizer_offload else {})
        if spec.grad_cosine:
            gpu["last gradient"] = 4 * updated
        gpu["reserve (assumed)"] = RESERVE_GB * GB * bool(world.gpus_per_node)
        stepping = sum(gpu.values()) + 4 * updated * (not spec.optimizer_offload)
        gpu |= {
            "kept for backward": (spec.pp - stage) * layers * kept,
            "layer at work (assumed)": 2 * layer(hf, row, spec.tp, size, UNEVEN) + routes,
            "logits": logits(hf, row, spec) if stage == spec.pp - 1 else 0,
        }
        host = {
            "weights kept": copies * size * (dense + experts),
            "Adam": OFFLOADED * updated * spec.optimizer_offload,
        }
        ranks = spec.ranks // spec.pp
        span = range(stage * ranks, (stage + 1) * ranks)
        memories.append(RankMemory(span, dense, experts, gpu, stepping, host))
    return memories


def engine(world: EngineWorld, hf: dict, longest: int) -> EngineMemory:
    """An engine of the recipe."""
    tp, options, size = world.engine.tp, world.engine.options, SIZE[world.engine.dtype]
    groups, total = families.kv_heads(hf), 0.0
    for slot in slots.rules(hf):
        split = 1 if slot.axis is None and ".experts." not in slot.hf else tp
        if slot.hf.split(".")[-2] in ("k_proj", "v_proj"):
            split = min(tp, groups)  # a GPU has at least one
        total += size * math.prod(slot.shape) / split
    size = 1 if str(options.get("kv_cache_dtype", "auto")).startswith("fp8") else size
    token = 2 * size * hf["num_hidden_layers"] * max(groups // tp, 1) * families.head_dim(hf)
    if not world.gpus_per_node:
        return EngineMemory(total, token, None, None)
    room = world.gpu_gb * GB * options.get("mem_fraction_static", MEM_FRACTION) - total
    tokens = min(max(int(room // token), 0), options.get("max_total_tokens", math.inf))
    most = options.get("max_running_requests", math.inf)
    return EngineMemory(total, token, tokens, min(tokens // longest, most))


def fits(recipe: Recipe, available: int | None = None) -> Plan:
    """The plan of a recipe, on `available` nodes where their number is known.

    Raises ConfigError, one sentence, for a model that cannot be shared so, for more GPUs than there
    are, and for memory that does not suffice: which rank, how much, and what would help.
    """
    world, hf = recipe.world, config(recipe.world)
    check(hf, world)
    if (n := nodes(world)) > (n if available is None else available):
        raise ConfigError(f"world: needs {n} nodes of {world.gpus_per_node} GPUs, not {available}")
    longest = min(world.max_new_tokens + PROMPT, context(hf, world))
    ranks, sampler = trainer(recipe, hf, world.trainer, longest), engine(world, hf, longest)
    if world.gpus_per_node:
        first = max(ranks, key=lambda x: x.need)
        if first.need > world.gpu_gb * GB:
            raise ConfigError(
                f"world.trainer: rank {first.ranks[0]} needs {first.need / GB:.1f} GB and a GPU has "
                f"{world.gpu_gb:g}; {_remedy(recipe, hf, longest)}"
            )
        if sampler.answers < 1:
            raise ConfigError(
                f"world.engine: beside {sampler.weights / GB:.1f} GB of weights, a GPU of "
                f"{world.gpu_gb:g} has cache for {sampler.tokens:,} tokens and an answer takes "
                f"{longest:,}; raise world.engine.tp or lower world.max_new_tokens"
            )
    total = sum(map(math.prod, slots.names(hf).values()))
    row = largest_row(world, world.trainer, longest)
    nodes_at = [hosts(recipe, hf, ranks, sampler, longest, row, x) for x in (1.0, LENGTH)]
    _judge_hosts(world, nodes_at[0])
    return Plan(recipe, hf, total, longest, row, ranks, sampler, *nodes_at)


def _judge_hosts(world: EngineWorld, nodes: list[HostMemory]) -> None:
    """Raises ConfigError for a node whose memory or object store does not suffice at full length."""
    if world.host_gb is None and world.shm_gb is None:
        return
    host = math.inf if world.host_gb is None else world.host_gb
    store = min(RAY_STORE * host, math.inf if world.shm_gb is None else world.shm_gb)
    for i, x in enumerate(nodes):
        if x.need > host * GB:
            parts = x.always | max(x.moments.values(), key=lambda moment: sum(moment.values()))
            largest = max(parts, key=parts.__getitem__)
            raise ConfigError(
                f"world.host_gb: node {i} needs {x.need / GB:,.1f} GB of memory at full length and has "
                f"{host:g}; the largest part is {largest}, {parts[largest] / GB:,.1f} GB (see `scaleup "
                "plan` without host_gb); fewer prompts or a smaller max_new_tokens or lag help"
            )
        if x.store > store * GB:
            raise ConfigError(
                f"world.shm_gb: Ray's object store takes {x.store / GB:,.1f} GB of node {i} and may take "
                f"{store:,.1f}: /dev/shm, and {RAY_STORE} of host_gb by Ray's own default; enlarge "
                "/dev/shm, or start Ray there with a larger --object-store-memory"
            )


def _remedy(recipe: Recipe, hf: dict, longest: int) -> str:
    """Which changes of the trainer would fit."""
    spec, remedies = recipe.world.trainer, []
    more = [{"ep": 2 * spec.ep}, {"ranks": 2 * spec.ranks}]
    more += [{"ranks": n * spec.ranks, "ep": 2 * spec.ep} for n in (2, 4)]
    small = [{"tokens": longest}, {"recompute": True}, {"optimizer_offload": True}]
    for change in [*small, {"recompute": True, "optimizer_offload": True}, *more]:
        other = spec.model_copy(update=change)
        words = {f"{k} = {str(v).lower()}" for k, v in change.items() if getattr(spec, k) != v}
        shared = not families.experts(hf) % other.ep and not other.ranks // other.pp % other.ep
        if not words or not shared or (other.ep > 1 and not families.experts(hf)):
            continue
        need = max(x.need for x in trainer(recipe, hf, other, longest))
        if need <= recipe.world.gpu_gb * GB and not any(words >= w for w, _ in remedies):
            remedies.append((words, f"{' and '.join(sorted(words))} ({need / GB:.0f} GB)"))
    if not remedies:
        return "it needs several of recompute, more ranks, larger ep"
    return f"it fits with {', or '.join(text for _, text in remedies)}"
