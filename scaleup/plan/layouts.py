"""What can be said about a recipe before anything is built: its model, its shares, its nodes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from scaleup.models import families
from scaleup.models.qwen import QWEN3_30B_A3B
from scaleup.world import EngineWorld
from simlab.study.strict import ConfigError


def config(world: EngineWorld) -> dict:
    """config.json of the recipe's model; Qwen3-30B-A3B is known by name. Raises ConfigError."""
    try:
        name, arguments = world.maker
        if name == "tiny":
            from scaleup.models import (
                tiny,  # here, as below: it needs safetensors, which a plan does not
            )

            # what `tiny.write` takes beside them are no fields
            return tiny.config(**{k: v for k, v in arguments.items() if k not in ("seed", "std")})
        if name == "smollm":
            from scaleup.models import smollm

            return smollm.CONFIG
        file = Path(world.model) / "config.json"
        if file.exists():
            return json.loads(file.read_text())
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"world.model: {world.model}: {error}") from error
    if Path(world.model).name in ("Qwen3-30B-A3B", "Qwen3-30B-A3B-Base"):
        return QWEN3_30B_A3B
    raise ConfigError(f"world.model: {world.model} holds no config.json")


def check(hf: dict, world: EngineWorld) -> None:
    """Raises ConfigError for a model that is not known, or that trainer ranks or engines cannot share so."""
    spec, tp = world.trainer, world.engine.tp
    try:
        families.check(hf)
    except ValueError as error:
        raise ConfigError(f"world.model: {error}") from error
    try:
        families.check_layout(hf, spec.tp, spec.pp, spec.ep)
    except ValueError as error:
        raise ConfigError(f"world.trainer: {error}") from error
    groups, moe = families.kv_heads(hf), families.family(hf).moe
    inner = "moe_intermediate_size" if moe else "intermediate_size"
    for name in ("num_attention_heads", inner):
        if hf[name] % tp:
            raise ConfigError(f"world.engine: {name} {hf[name]} cannot be shared by tp {tp}")
    if groups % tp and tp % groups:
        raise ConfigError(f"world.engine: num_key_value_heads {groups} cannot be shared by tp {tp}")
    if not moe and set(world.replay) != {"none"}:
        raise ConfigError(f"world.replay: {max(world.replay)} needs a mixture of experts")
    if (n := context(hf, world)) - world.max_new_tokens - MARGIN < 1:
        raise ConfigError(
            f"world.max_new_tokens: {world.max_new_tokens} tokens and a prompt do not fit into the {n} "
            "positions of the model"
        )


MARGIN = 2  # positions that SGLang keeps for itself


def context(hf: dict, world: EngineWorld) -> int:
    """Tokens of a prompt and its answer that the engine takes, at most."""
    return int(world.engine.options.get("context_length", hf["max_position_embeddings"]))


def bundles(world: EngineWorld) -> list[tuple[str, int]]:
    """(trainer or engine, GPUs) that must share a node, the trainer's first; [] on a CPU.

    Raises ConfigError for a group that no node can hold.
    """
    per, spec, engine = world.gpus_per_node, world.trainer, world.engine
    if not per:
        return []
    for name, tp in (("engine", engine.tp), ("trainer", spec.tp)):
        if tp > per:
            raise ConfigError(f"world.{name}: tp {tp} is more than the {per} GPUs of a node")
    # both kinds of group are neighbours among the ranks, whose order is that of Megatron
    both = math.lcm(spec.tp, spec.ep)
    fits = spec.tp < spec.ep and both <= per and spec.ranks % both == 0
    share = both if fits else spec.tp
    return [("trainer", share)] * (spec.ranks // share) + [("engine", engine.tp)] * engine.count


def packed(world: EngineWorld) -> list[tuple[int, int]]:
    """(trainer ranks, engines) of each node, the node of rank 0 first; [] on a CPU. Raises ConfigError."""
    filled = []  # GPUs left, ranks, engines
    for kind, n in sorted(bundles(world), key=lambda bundle: -bundle[1]):
        node = next((x for x in filled if x[0] >= n), None)
        if node is None:
            filled.append(node := [world.gpus_per_node, 0, 0])
        node[0] -= n
        node[1] += n * (kind == "trainer")
        node[2] += kind == "engine"
    return sorted(((r, e) for _, r, e in filled), key=lambda x: not x[0])


def nodes(world: EngineWorld) -> int:
    """Nodes that a recipe takes, 0 on a CPU. Raises ConfigError."""
    return len(packed(world))
