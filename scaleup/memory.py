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
                  rest of `simlab.logits` is a few blocks
    batch         fields of all tokens of a step: on the GPU as long as the step takes

The host of each node is `scaleup.memory_host`'s.

Assumed, not measured; the constants below, and marked in what is printed:

    a GPU         RESERVE_GB for CUDA, NCCL and fragments; 1 GB is 1e9 bytes
    a layer       at work takes twice its tensors (values and gradients), with the experts of a rank
                  UNEVEN times as busy as the mean; one kernel an RMSNorm, attention without scores
    Adam's step   takes one float32 temporary, torch's; Transformer Engine and Apex need none
    a prompt      has PROMPT tokens at most
    an engine     fills MEM_FRACTION of its GPU where `mem_fraction_static` is not set
    sums          parts that do not meet (logits, a layer at work) are added all the same

`optimizer_offload` has not been run: Megatron's moves from a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from scaleup import weights
from scaleup.layouts import check, config, context, nodes
from scaleup.memory_host import LENGTH, OFFLOADED, SIZE, HostMemory, hosts
from scaleup.recipe import EngineWorld, Recipe, TrainerSpec
from simlab.config import ConfigError
from simlab.logits import DEVICE_BLOCK_BYTES
from simlab.specs import regime

GB = 1e9
RESERVE_GB, UNEVEN, PROMPT, MEM_FRACTION = 4.0, 2.0, 1024, 0.85
TOKEN_BYTES = 78  # ids, places, positions, log-probs, ages and masks of a token of the step


class RankMemory(NamedTuple):
    """A rank of one pipeline stage; all of a stage hold as much. Bytes."""

    ranks: range
    dense: int  # parameters
    experts: int
    gpu: dict[str, float]  # during the passes, without the batch
    stepping: float  # during Adam's step, without the batch
    host: dict[str, float]

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def need(self) -> float:
        """Of the GPU at the fullest moment, without the batch."""
        return max(sum(self.gpu.values()), self.stepping)


class EngineMemory(NamedTuple):
    """An engine with its cache of keys and values; None where a CPU sets no limit."""

    weights: float  # bytes of a GPU
    token: float  # bytes of a token in the cache of a GPU
    tokens: int | None  # that the cache holds
    answers: int | None  # of full length, at once


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
    layers, mine = hf["num_hidden_layers"] // pp, weights.experts(hf) // ep
    found = [[0, 0] for _ in range(pp)]
    for slot in weights.rules(hf, tp):
        words = slot.megatron.split(".")
        expert = "local_experts" in words
        if expert and int(words[words.index("local_experts") + 1]) >= mine:
            continue  # of another rank, which holds as many
        inside = words[1] == "layers"
        stage = int(words[2]) // layers if inside else -(words[0] != "embedding")
        found[stage][expert] += math.prod(slot.shape) // (1 if slot.axis is None else tp)
    if hf.get("tie_word_embeddings") and pp > 1:  # the last stage has a copy
        found[-1][0] += hf["vocab_size"] * hf["hidden_size"] // tp
    return [tuple(x) for x in found]


def layer(hf: dict, row: int, tp: int, size: int, uneven: float = 1.0) -> float:
    """Bytes that autograd keeps of one layer on a rank; `row` tokens of `size` bytes a number."""
    h, d, q = hf["hidden_size"], weights.head_dim(hf), hf["num_attention_heads"]
    g = hf.get("num_key_value_heads") or q
    # q k v; turned q and k; the result twice; with a norm, queries before it. Sines and cosines
    heads = (q + 2 * g) + (q + g) + 2 * q + (0 if hf["model_type"] == "llama" else q)
    found = row * (size * heads * d + 4 * q) / tp + row * size * 4 * d
    found += 4 * size * h * row / tp  # the norms' inputs and outputs
    if E := weights.experts(hf):
        k, f = hf["num_experts_per_tok"], hf["moe_intermediate_size"]
        return found + (size * uneven * k * (h + 6 * f) + 5 * E + 24 * k) * row / tp
    return found + 5 * size * hf["intermediate_size"] * row / tp


def largest_row(world: EngineWorld, at: TrainerSpec, longest: int) -> int:
    """Tokens of the largest micro-batch, as TrainerSpec.tokens promises it."""
    share = math.ceil(world.prompts * world.answers * at.tp * at.pp / at.ranks) * longest
    return math.ceil(max(min(at.tokens, share), longest) / at.tp) * at.tp


def trainer(recipe: Recipe, hf: dict, at: TrainerSpec, longest: int) -> list[RankMemory]:
    """A rank of each pipeline stage of the trainer `at`."""
    world, size, found = recipe.world, SIZE[at.dtype], []
    row, layers = largest_row(world, at, longest), hf["num_hidden_layers"] // at.pp
    oldest = max(regime(lag).largest_age for lag in recipe.lags)
    copies = bool(recipe.training.kl_coef) + at.keep_weights * (oldest + 1)
    copies += copies > 0  # the present weights, set aside
    replayed = any(replay != "none" for replay in world.replay)
    routes = 8 * layers * hf.get("num_experts_per_tok", 0) * row / at.tp * replayed  # int64
    for stage, (dense, experts) in enumerate(parameters(hf, at.tp, at.pp, at.ep)):
        n, ranks = dense + experts, at.ranks // at.pp
        shard = dense * at.tp / ranks + experts * at.ep / ranks
        held = size * hf["hidden_size"] * row / at.tp
        if not at.recompute:
            held = layer(hf, row, at.tp, size)
        logits = 2 * size * row * hf["vocab_size"] / at.tp + 2 * DEVICE_BLOCK_BYTES
        gpu = {
            "weights": size * n,
            "gradients": 4 * n,
            "Adam": 0 if at.optimizer_offload else shard * (8 if size == 4 else 12),
            "reserve (assumed)": RESERVE_GB * GB * bool(world.gpus_per_node),
        }
        stepping = sum(gpu.values()) + 4 * shard * (not at.optimizer_offload)
        gpu |= {
            "kept for backward": (at.pp - stage) * layers * held,
            "layer at work (assumed)": 2 * layer(hf, row, at.tp, size, UNEVEN) + routes,
            "logits": logits if stage == at.pp - 1 else 0,
        }
        host = {
            "weights kept": copies * size * n,
            "Adam": OFFLOADED * shard * at.optimizer_offload,
        }
        span = range(stage * ranks, (stage + 1) * ranks)
        found.append(RankMemory(span, dense, experts, gpu, stepping, host))
    return found


def engine(world: EngineWorld, hf: dict, longest: int) -> EngineMemory:
    """An engine of the recipe."""
    tp, options, size = world.engine.tp, world.engine.options, SIZE[world.engine.dtype]
    groups, held = hf.get("num_key_value_heads") or hf["num_attention_heads"], 0.0
    for slot in weights.rules(hf):
        split = 1 if slot.axis is None and ".experts." not in slot.hf else tp
        if slot.hf.endswith(("k_proj.weight", "v_proj.weight")):
            split = min(tp, groups)  # a GPU has at least one
        held += size * math.prod(slot.shape) / split
    size = 1 if str(options.get("kv_cache_dtype", "auto")).startswith("fp8") else size
    token = 2 * size * hf["num_hidden_layers"] * max(groups // tp, 1) * weights.head_dim(hf)
    if not world.gpus_per_node:
        return EngineMemory(held, token, None, None)
    room = world.gpu_gb * GB * options.get("mem_fraction_static", MEM_FRACTION) - held
    tokens = min(max(int(room // token), 0), options.get("max_total_tokens", math.inf))
    most = options.get("max_running_requests", math.inf)
    return EngineMemory(held, token, tokens, min(tokens // longest, most))


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
    total = sum(map(math.prod, weights.names(hf).values()))
    row = largest_row(world, world.trainer, longest)
    nodes_at = [hosts(recipe, hf, ranks, sampler, longest, row, x) for x in (1.0, LENGTH)]
    return Plan(recipe, hf, total, longest, row, ranks, sampler, *nodes_at)


def _remedy(recipe: Recipe, hf: dict, longest: int) -> str:
    """Which changes of the trainer would fit."""
    at, found = recipe.world.trainer, []
    more = [{"ep": 2 * at.ep}, {"ranks": 2 * at.ranks}]
    more += [{"ranks": n * at.ranks, "ep": 2 * at.ep} for n in (2, 4)]
    small = [{"tokens": longest}, {"recompute": True}, {"optimizer_offload": True}]
    for change in [*small, {"recompute": True, "optimizer_offload": True}, *more]:
        other = at.model_copy(update=change)
        words = {f"{k} = {str(v).lower()}" for k, v in change.items() if getattr(at, k) != v}
        shared = not weights.experts(hf) % other.ep and not other.ranks // other.pp % other.ep
        if not words or not shared or (other.ep > 1 and not weights.experts(hf)):
            continue
        need = max(x.need for x in trainer(recipe, hf, other, longest))
        if need <= recipe.world.gpu_gb * GB and not any(words >= w for w, _ in found):
            found.append((words, f"{' and '.join(sorted(words))} ({need / GB:.0f} GB)"))
    said = ", or ".join(text for _, text in found)
    return (
        f"it fits with {said}" if said else "it needs several of recompute, more ranks, larger ep"
    )


def plan(recipe: Recipe, available: int | None = None) -> str:
    """The text of `scaleup plan`. Raises ConfigError as `fits`."""
    from scaleup.memory_table import table

    return table(fits(recipe, available))
