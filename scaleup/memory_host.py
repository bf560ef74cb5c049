"""The host memory of every node, for `scaleup.memory`: answers at full length, and again at LENGTH of it.

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
readers of a node share it. That is RAY_ENABLE_ZERO_COPY_TORCH_TENSORS, set in `scaleup.host`.

Assumed, not measured, and marked in what is printed:

    LENGTH        of full length, as an example of shorter answers
    nodes         are filled as `scaleup.layouts.packed` does, the controller beside rank 0
    sums          moments are not added, but the controller's answers are at their most in each
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
from typing import TYPE_CHECKING, NamedTuple

from scaleup import weights
from scaleup.layouts import packed
from scaleup.recipe import EngineWorld, Recipe, TrainerSpec
from simlab.specs import regime

if TYPE_CHECKING:
    from scaleup.memory import EngineMemory, RankMemory

SIZE = {"float32": 4, "bfloat16": 2}
OFFLOADED = 16  # bytes a parameter on the host: float32 weight, gradient and two moments
GATHERED = 12  # bytes a parameter in a checkpoint: float32 weight and two moments
ID_BYTES = 36  # a token id in a list: a pointer and a Python int
LENGTH = 0.25  # of full length, in the second column


class HostMemory(NamedTuple):
    """A node. Bytes."""

    ranks: int
    engines: int
    always: dict[str, float]
    moments: dict[str, dict[str, float]]
    store: float  # of all that, in Ray's object store, at most

    @property
    def need(self) -> float:
        """At the fullest moment."""
        return sum(self.always.values()) + max(sum(x.values()) for x in self.moments.values())


def waiting(lag: str, steps: int) -> int:
    """Batches begun and not trained, at most, as `scaleup.controller` begins them and serves weights."""
    how, served, begun, most = regime(lag), 0, 0, 0
    for step in range(steps):
        while begun < steps and how.may_start(begun, served):
            begun += 1
        most = max(most, begun - step)
        if how.broadcast_now(step + 1):
            served = step + 1
    return most


def routing(hf: dict) -> int:
    """Bytes of the experts that a token chooses, over all layers, as an engine hands them over."""
    chosen = hf["num_hidden_layers"] * hf.get("num_experts_per_tok", 0)
    return weights.narrow(n).itemsize * chosen if (n := weights.experts(hf)) else 0


def sample(hf: dict, tokens: float, sampled: float, replay: str) -> float:
    """Bytes of a `rollout.Sample` of `tokens`, of which `sampled` are the answer."""
    return (ID_BYTES + routing(hf) * (replay == "r3")) * tokens + 12 * sampled


def response(hf: dict, tokens: float, sampled: float, replay: str) -> float:
    """Bytes of the `responses.Response` that is made of it."""
    return sample(hf, tokens, sampled, replay) + (8 - ID_BYTES) * tokens


def replayed(hf: dict, world: EngineWorld, tokens: float, row: int, replay: str) -> float:
    """Bytes of experts on a rank, of its share of a batch of `tokens`, all in micro-batches of `row`."""
    if replay == "none":
        return 0
    found = routing(hf) * tokens / world.trainer.ranks
    if replay == "r3":  # the experts of a micro-batch as int64, sorted, and the order
        chosen = hf["num_hidden_layers"] * hf["num_experts_per_tok"]
        found += 3 * 8 * chosen * row
    return found


def saved(x: RankMemory, i: int, at: TrainerSpec) -> tuple[float, float, float]:
    """Bytes on rank i of a stage in a checkpoint: Adam's numbers, what gathering takes, the copies."""
    # parameters of a buffer, and how many ranks gather it, each its own
    parts = [(x.dense, at.tp), (x.experts, at.ep)]
    held = sum(m for m, n in parts if i < n)
    # of one part: a shard, and where it is gathered what came of this number and of the last
    gathering = max(m * (n / len(x.ranks) + (i < n)) for m, n in parts)
    return GATHERED * held, GATHERED * gathering, (GATHERED + SIZE[at.dtype]) * held


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
    world, at = recipe.world, recipe.world.trainer
    most = max(waiting(lag, recipe.training.steps) for lag in recipe.lags)
    answers = world.prompts * world.answers
    tokens, sampled = length * longest, length * world.max_new_tokens
    held = answers * max(sample(hf, tokens, sampled, x) for x in world.replay)
    batch = answers * max(response(hf, tokens, sampled, x) for x in world.replay)
    routes = max(replayed(hf, world, answers * tokens, row, x) for x in world.replay)
    total = sum(map(math.prod, weights.names(hf).values()))
    whole, served = SIZE[at.dtype] * total, SIZE[world.engine.dtype] * total
    chosen = 4 * hf["num_hidden_layers"] * hf.get("num_experts_per_tok", 0)  # int32
    in_engine = chosen * (sampler.tokens or 0) * world.engine.tp * bool(weights.experts(hf))
    everyone, found = [(x, i) for x in ranks for i in range(len(x.ranks))], []
    one = [(at.ranks, world.engine.count)]  # a CPU's
    for node, (r, e) in enumerate(packed(world) or one):
        mine, everyone = everyone[:r], everyone[r:]
        first, stored = node == 0, whole * (node == 0 or e > 0)
        writes = [saved(x, i, at) for x, i in mine] if world.checkpoint_every else []
        always = {
            "weights kept by ranks": sum(x.host["weights kept"] for x, _ in mine),
            "Adam": sum(x.host["Adam"] for x, _ in mine),
            f"answers of {most} batches": most * held * first,
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
        found.append(HostMemory(r, e, always, moments, store))
    return found
