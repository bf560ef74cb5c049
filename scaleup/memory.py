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

On the host, by node; every answer at full length, and again at LENGTH of it:

    weights kept  of each rank, a copy of every version kept, one of the reference and one set aside
    Adam          OFFLOADED bytes a parameter, where the recipe puts it there
    answers       in the controller, with ids as Python ints and all their experts: those of every
                  batch begun and not trained, found by stepping the lag regimes as the controller does
    a step        one batch in Ray's store, and in every rank a copy; twice while it is read, or once
                  with what the rank replays (int64 copies of a micro-batch) where that is more
    a push        the last weights in Ray's store; rank 0 holds the new ones and pickles them, later
                  an engine holds them and a clone
    a checkpoint  the answers that wait, in Ray's store and at rank 0, which reads them like a batch;
                  then Adam's numbers and float32 weights of all parameters of a rank, on every rank

Ray 2.60 pickles torch tensors into its stream, not beside it: no rank reads them from the store, a
reader holds the bytes and the tensors until it has read all, a writer twice the bytes. (Ray has
RAY_ENABLE_ZERO_COPY_TORCH_TENSORS, off by default and off here.)

Assumed, not measured; the constants below, and marked in what is printed:

    a GPU         RESERVE_GB for CUDA, NCCL and fragments; 1 GB is 1e9 bytes
    a layer       at work takes twice its tensors (values and gradients), with the experts of a rank
                  UNEVEN times as busy as the mean; one kernel an RMSNorm, attention without scores
    Adam's step   takes one float32 temporary, torch's; Transformer Engine and Apex need none
    a prompt      has PROMPT tokens at most
    an engine     fills MEM_FRACTION of its GPU where `mem_fraction_static` is not set
    sums          parts that do not meet (logits, a layer at work) are added all the same; on the host
                  moments are not, but the controller's answers are at their most in each
    nodes         are filled as `scaleup.layouts.nodes` counts them, the controller beside rank 0
    LENGTH        of full length, as an example of shorter answers
    a checkpoint  is copied once more to be written, with the weights; a GPU gathers its float32
                  numbers, one kind and one buffer at a time (read in Megatron, not run; a recipe is
                  not refused for it)
    SGLang        keeps the experts of every cached token, pinned, in each process of an engine (read
                  in its source, not measured)

Not counted: the processes themselves and their libraries, finished answers inside an engine that
wait for their group (4 bytes a choice), the buckets of a push, evaluations, files in the page cache.

`optimizer_offload` has not been run: Megatron's moves from a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from scaleup import weights
from scaleup.layouts import bundles, check, config, context, nodes
from scaleup.recipe import EngineWorld, Recipe, TrainerSpec
from simlab.config import ConfigError
from simlab.logits import DEVICE_BLOCK_BYTES
from simlab.specs import regime

GB = 1e9
SIZE = {"float32": 4, "bfloat16": 2}
RESERVE_GB, UNEVEN, PROMPT, MEM_FRACTION = 4.0, 2.0, 1024, 0.85
TOKEN_BYTES = 78  # ids, places, positions, log-probs, ages and masks of a token of the step
OFFLOADED = 16  # bytes a parameter on the host: float32 weight, gradient and two moments
GATHERED = 12  # bytes a parameter in a checkpoint: float32 weight and two moments
ID_BYTES = 36  # a token id in a list: a pointer and a Python int
LENGTH = 0.25  # of full length, in the second column of the host's memory


class RankMemory(NamedTuple):
    """A rank of one pipeline stage; all of a stage hold as much. Bytes."""

    ranks: range
    parameters: int
    gpu: dict[str, float]  # during the passes, without the batch
    stepping: float  # during Adam's step, without the batch
    host: dict[str, float]
    saving: float  # of the GPU while a checkpoint is gathered; not in `need`

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


class HostMemory(NamedTuple):
    """A node. Bytes."""

    ranks: int
    engines: int
    always: dict[str, float]
    moments: dict[str, dict[str, float]]  # a step, export and load of a push, a checkpoint
    store: float  # of all that, in Ray's object store, at most

    @property
    def need(self) -> float:
        """At the fullest moment."""
        return sum(self.always.values()) + max(sum(x.values()) for x in self.moments.values())


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
    share = math.ceil(world.prompts * world.answers * longest * at.tp * at.pp / at.ranks)
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
        # a shard is sent and all of a buffer received: that of the experts or that of the rest
        gathered = max(dense + dense * at.tp / ranks, experts + experts * at.ep / ranks)
        saving = sum(gpu.values()) + 4 * gathered
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
        found.append(RankMemory(span, n, gpu, stepping, host, saving))
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


def waiting(lag: str, steps: int, every: int = 0) -> tuple[int, int]:
    """Batches begun and not trained, at most: ever, and at a checkpoint (after `every` steps).

    As `scaleup.controller` begins batches and serves weights.
    """
    how, served, begun, most, saved = regime(lag), 0, 0, 0, 0
    for step in range(steps):
        while begun < steps and how.may_start(begun, served):
            begun += 1
        most = max(most, begun - step)
        if how.broadcast_now(step + 1):
            served = step + 1
        if every and (step + 1) % every == 0:
            saved = max(saved, begun - step - 1)
    return most, saved


def choices(hf: dict) -> int:
    """Experts that a token chooses, over all layers."""
    return hf["num_hidden_layers"] * hf.get("num_experts_per_tok", 0) * bool(weights.experts(hf))


def sample(hf: dict, tokens: float, sampled: float) -> float:
    """Bytes of a `rollout.Sample` of `tokens`, of which `sampled` are the answer."""
    size = weights.narrow(weights.experts(hf)).itemsize  # as an engine hands experts over
    return (ID_BYTES + size * choices(hf)) * tokens + 12 * sampled


def response(hf: dict, tokens: float, sampled: float) -> float:
    """Bytes of the `responses.Response` that is made of it."""
    return sample(hf, tokens, sampled) + (8 - ID_BYTES) * tokens


def packed(world: EngineWorld) -> list[tuple[int, int]]:
    """(trainer ranks, engines) of each node, the node of rank 0 first; one node on a CPU."""
    found = []  # GPUs left, ranks, engines
    for kind, n in sorted(bundles(world), key=lambda bundle: -bundle[1]):
        at = next((x for x in found if x[0] >= n), None)
        if at is None:
            found.append(at := [world.gpus_per_node, 0, 0])
        at[0] -= n
        at[1] += n * (kind == "trainer")
        at[2] += kind == "engine"
    found = [(r, e) for _, r, e in found] or [(world.trainer.ranks, world.engine.count)]
    return sorted(found, key=lambda x: not x[0])


def hosts(
    recipe: Recipe,
    hf: dict,
    ranks: list[RankMemory],
    sampler: EngineMemory,
    longest: int,
    length: float = 1.0,
) -> list[HostMemory]:
    """Every node, where prompts and answers have `length` of the tokens that they may have."""
    world, at = recipe.world, recipe.world.trainer
    each = [waiting(lag, recipe.training.steps, world.checkpoint_every) for lag in recipe.lags]
    most, saved = (max(x) for x in zip(*each, strict=True))
    tokens, sampled = length * longest, length * world.max_new_tokens
    answers = world.prompts * world.answers
    held = answers * sample(hf, tokens, sampled)
    batch = answers * response(hf, tokens, sampled)  # a pickle of samples is no larger
    total = sum(map(math.prod, weights.names(hf).values()))
    whole, served = SIZE[at.dtype] * total, SIZE[world.engine.dtype] * total
    per_choice = weights.narrow(weights.experts(hf)).itemsize
    routes = per_choice * choices(hf) * answers * tokens / at.ranks
    if "r3" in world.replay:  # the experts of a micro-batch as int64, sorted, and the order
        routes += 3 * 8 * choices(hf) * largest_row(world, at, longest)
    routes *= set(world.replay) != {"none"}
    waits = f"answers of {saved} batches"
    everyone, found = [x for x in ranks for _ in x.ranks], []
    for node, (r, e) in enumerate(packed(world)):
        mine, first, writes = everyone[:r], node == 0, bool(world.checkpoint_every)
        everyone = everyone[r:]
        n = sum(x.parameters for x in mine)
        stored = whole * bool(first or e)
        always = {
            "weights kept by ranks": sum(x.host["weights kept"] for x in mine),
            "Adam": sum(x.host["Adam"] for x in mine),
            f"answers of {most} batches": most * held * first,
            "weights in Ray's store": stored,
            "experts in SGLang (assumed)": 4.0 * choices(hf) * (sampler.tokens or 0)
            * e * world.engine.tp,
        }  # fmt: skip
        moments = {
            "a step": {
                "batch in Ray's store": batch * bool(r),
                "batch in ranks, being read": max(2 * batch, batch + routes) * r,
            },
            "a push, from rank 0": {"new weights, pickled": 3 * whole * first},
            "a push, to engines": {
                "new weights in engines": max(2 * whole, whole + served) * e,
            },
            "a checkpoint, read by rank 0": {
                f"{waits}, stored": saved * batch * first,
                "being read": saved * (batch + held) * first,
            },
            "a checkpoint, written": {
                f"{waits}, stored": saved * batch * first,
                "at rank 0": saved * held * first,
                "Adam, gathered": GATHERED * n * writes,
                "copied to be written (assumed)": (GATHERED + SIZE[at.dtype])
                * min(n, total)
                * writes,
            },
        }
        # of the two checkpoints of a push, the older is in `stored`
        store = stored + max(batch * bool(r), whole * first, saved * batch * first)
        found.append(HostMemory(r, e, always, moments, store))
    return found


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
    nodes_at = [hosts(recipe, hf, ranks, sampler, longest, x) for x in (1.0, LENGTH)]
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
