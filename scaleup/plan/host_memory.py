"""The host memory of every node, for `scaleup.plan.memory`: answers at full length, and again at LENGTH of it.

    weights kept  of each rank, a copy of every version kept, one of the reference and one set aside
    Adam          OFFLOADED bytes a parameter, where the recipe puts it there
    answers       in the controller, with ids as Python ints and, for replay r3, all their experts:
                  those of every batch begun and not trained, found by stepping the lag regimes as
                  the controller does
    a step        one batch in Ray's store of each node that has ranks, which read it there; ids and
                  ages made for it in the controller; in ranks, the experts that they replay and,
                  for r3, int64 copies of a micro-batch's
    a push        the last weights in Ray's store, beside rank 0 and engines; the new ones at rank 0
                  and in the store of its node, later a copy of them in every engine
    a checkpoint  Adam's numbers and float32 weights at the first rank of those that share them; its
                  parts while they are gathered, then copies of all that it writes
    a resume      the same numbers, of all parameters of a rank, on every rank

Ray puts a torch tensor, inside whatever object, beside the pickle: once into the store, where all
readers of a node share it. That is RAY_ENABLE_ZERO_COPY_TORCH_TENSORS, set in `scaleup.run.cluster`.

Assumed, not measured, and marked in what is printed:

    LENGTH        of full length, as an example of shorter answers
    nodes         are filled as `layouts.packed` does, the controller beside rank 0
    sums          peaks are not summed; each assumes the controller's peak backlog of answers
    a checkpoint  gathers the experts and the rest one after the other (measured on two ranks of a
                  CPU, where gloo at times let go late and took a third more); what is copied, and a
                  resume, are read in Megatron, not measured
    SGLang        keeps the experts of every cached token, pinned, in each process of an engine,
                  whatever the replay (read in its source, not measured)

Not counted: the processes themselves and their libraries, answers on their way (finished in an engine
and waiting for their group, then in Ray's store until the controller has copied them), the buckets
of a push, ids in the pickle of run.pt, token logs, evaluations, files in the page cache.
"""

from __future__ import annotations

import math

from scaleup.models import families, slots
from scaleup.plan.layouts import packed
from scaleup.plan.sizes import EngineMemory, HostMemory, RankMemory
from scaleup.recipe import Recipe
from scaleup.world import EngineWorld, TrainerSpec
from simlab.study.specs import regime

SIZE = {"float32": 4, "bfloat16": 2}
OFFLOADED = 16  # bytes a parameter on the host: float32 weight, gradient and two moments
GATHERED = 12  # bytes a parameter in a checkpoint: float32 weight and two moments
ID_BYTES = 36  # a token id in a list: a pointer and a Python int
LENGTH = 0.25  # of full length, in the second column


def waiting(lag: str, steps: int) -> int:
    """Batches begun and not trained, at most, as `scaleup.run.controller` begins them and serves weights."""
    rule, served, begun, most = regime(lag), 0, 0, 0
    for step in range(steps):
        while begun < steps and rule.may_start(begun, served):
            begun += 1
        most = max(most, begun - step)
        if rule.broadcast_now(step + 1):
            served = step + 1
    return most


def routing(hf: dict) -> int:
    """Bytes of the experts that a token chooses, over all layers, as an engine hands them over."""
    chosen = hf["num_hidden_layers"] * hf.get("num_experts_per_tok", 0)
    return families.narrow(n).itemsize * chosen if (n := families.experts(hf)) else 0


def sample(hf: dict, tokens: float, sampled: float, replay: str, head: int = 0) -> float:
    """Bytes of a `rollout.Sample` of `tokens`, of which `sampled` are the answer, with `head` ids and
    log-probs each."""
    return (ID_BYTES + routing(hf) * (replay == "r3")) * tokens + (12 + 8 * head) * sampled


def response(hf: dict, tokens: float, sampled: float, replay: str, head: int = 0) -> float:
    """Bytes of the `responses.Response` that is made of it: ids are int64."""
    return sample(hf, tokens, sampled, replay, head) + (8 - ID_BYTES) * tokens + 4 * head * sampled


def replayed(hf: dict, world: EngineWorld, tokens: float, row: int, replay: str) -> float:
    """Bytes of experts on a rank, of its share of a batch of `tokens`, all in micro-batches of `row`."""
    if replay == "none":
        return 0
    total = routing(hf) * tokens / world.trainer.ranks
    if replay == "r3":  # the experts of a micro-batch as int64, sorted, and the order
        chosen = hf["num_hidden_layers"] * hf["num_experts_per_tok"]
        total += 3 * 8 * chosen * row
    return total


def saved(x: RankMemory, i: int, spec: TrainerSpec) -> tuple[float, float, float]:
    """Bytes on rank i of a stage in a checkpoint: Adam's numbers, what gathering takes, the copies."""
    # parameters of a buffer, and how many ranks gather it, each its own
    parts = [(x.dense, spec.tp), (x.experts, spec.ep)]
    gathered = sum(m for m, n in parts if i < n)
    # of one part: a shard, and where it is gathered what came of this number and of the last
    gathering = max(m * (n / len(x.ranks) + (i < n)) for m, n in parts)
    return GATHERED * gathered, GATHERED * gathering, (GATHERED + SIZE[spec.dtype]) * gathered


def hosts(
    recipe: Recipe,
    hf: dict,
    ranks: list[RankMemory],
    sampler: EngineMemory,
    longest: int,
    row: int,
    length: float = 1.0,
) -> list[HostMemory]:
    """Every node, where prompts and answers have `length` of the tokens that they may have."""
    world, spec = recipe.world, recipe.world.trainer
    most = max(waiting(lag, recipe.training.steps) for lag in recipe.lags)
    answers = world.prompts * world.answers
    tokens, sampled = length * longest, length * world.max_new_tokens
    one_batch = answers * max(sample(hf, tokens, sampled, x, recipe.head) for x in world.replay)
    batch = answers * max(response(hf, tokens, sampled, x, recipe.head) for x in world.replay)
    routes = max(replayed(hf, world, answers * tokens, row, x) for x in world.replay)
    total = sum(map(math.prod, slots.names(hf).values()))
    whole, served = SIZE[spec.dtype] * total, SIZE[world.engine.dtype] * total
    chosen = 4 * hf["num_hidden_layers"] * hf.get("num_experts_per_tok", 0)  # int32
    in_engine = chosen * (sampler.tokens or 0) * world.engine.tp * bool(families.experts(hf))
    everyone, nodes = [(x, i) for x in ranks for i in range(len(x.ranks))], []
    one = [(spec.ranks, world.engine.count)]  # a CPU's
    for node, (r, e) in enumerate(packed(world) or one):
        mine, everyone = everyone[:r], everyone[r:]
        first, stored = node == 0, whole * (node == 0 or e > 0)
        writes = [saved(x, i, spec) for x, i in mine] if world.checkpoint_every else []
        always = {
            "weights kept by ranks": sum(x.host["weights kept"] for x, _ in mine),
            "Adam": sum(x.host["Adam"] for x, _ in mine),
            f"answers of {most} batches": most * one_batch * first,
            "weights in Ray's store": stored,
            "experts in SGLang (assumed)": in_engine * e,
        }
        moments = {
            "a step": {
                "batch in Ray's store": batch * bool(r),
                "ids and ages in the controller": 8 * answers * (tokens + sampled) * first,
                "experts in ranks": routes * r,
            },
            "a push, from rank 0": {"new weights, at rank 0 and stored": 2 * whole * first},
            "a push, to engines": {"new weights in engines": served * e},
            "a checkpoint": {
                "Adam, gathered": sum(x for x, _, _ in writes),
                "parts or copies of it (assumed)": sum(max(x) for _, *x in writes),
            },
            "a resume": {
                "Adam, read (assumed)": GATHERED * sum(x.parameters for x, _ in mine) * bool(writes)
            },
        }
        # of the two versions of a push, the older is in `stored`
        store = stored + max(batch * bool(r), whole * first)
        nodes.append(HostMemory(r, e, always, moments, store))
    return nodes
