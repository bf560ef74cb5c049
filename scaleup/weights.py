"""Weights between Hugging Face and Megatron-Core: Qwen3-MoE, dense Qwen3 and Llama.

    load(model, read(folder))               # full tensors by Hugging Face names, on every rank
    for name, tensor in export(model): ...  # collective; full tensors, on every rank

Every Hugging Face tensor is, up to its split over ranks, a view of a Megatron parameter:

    Megatron (local spec)                      Hugging Face                       split over
    embedding.word_embeddings.weight           model.embed_tokens.weight          TP, rows
    decoder.layers.i.input_layernorm           model.layers.i.input_layernorm
      self_attention.linear_qkv                  self_attn.{q,k,v}_proj           TP, KV groups
      self_attention.linear_proj                 self_attn.o_proj                 TP, columns
      self_attention.{q,k}_layernorm             self_attn.{q,k}_norm
      pre_mlp_layernorm                          post_attention_layernorm
      mlp.linear_fc1 (dense)                     mlp.{gate,up}_proj               TP, rows
      mlp.linear_fc2 (dense)                     mlp.down_proj                    TP, columns
      mlp.router                                 mlp.gate
      mlp.experts.local_experts.j.linear_fc1     mlp.experts.e.{gate,up}_proj     EP, e = EP rank * E/EP + j
      mlp.experts.local_experts.j.linear_fc2     mlp.experts.e.down_proj          EP
    decoder.final_layernorm                    model.norm
    output_layer.weight (untied)               lm_head.weight                     TP, rows

linear_qkv holds, for each KV group, the queries of the group, its key and its value. With the parts
of Transformer Engine the norms before a linear layer and the experts have other names; both are
known here, but only the local spec has been run. A layer's number under PP is its global number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = ("qwen3_moe", "qwen3", "llama")
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Slot(NamedTuple):
    """One Hugging Face tensor inside one Megatron parameter of this rank."""

    hf: str
    megatron: str  # the parameter's name in the local spec, layers and experts by global number
    shape: tuple[int, ...]  # of the full Hugging Face tensor
    axis: int | None  # its axis that is split over TP, None where every rank holds it whole
    view: Callable[[Tensor], Tensor]  # parameter -> the part that is this tensor's share, a view


def head_dim(hf: dict) -> int:
    """Channels of an attention head."""
    unsaid = 128 if hf["model_type"] == "qwen3" else None  # as transformers reads it
    return hf.get("head_dim", unsaid) or hf["hidden_size"] // hf["num_attention_heads"]


def experts(hf: dict) -> int:
    """Experts of a layer, 0 in a dense model; transformers 5 writes another name."""
    return hf.get("num_experts") or hf.get("num_local_experts") or 0


def narrow(n: int) -> torch.dtype:
    """The smallest integers that name n experts."""
    return torch.uint8 if n <= 256 else torch.int16


def rules(hf: dict, tp: int = 1) -> Iterator[Slot]:
    """The slots of the whole model of config.json `hf`, in the order of its file.

    `tp` ranks share a dense layer; the views are of one rank's parameter. Raises ValueError for a
    kind of model that is not known and for a field that is missing.
    """
    kind = hf.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"weights: no mapping for model_type {kind!r}, only {', '.join(KINDS)}")
    experts_too = ("moe_intermediate_size", "num_experts_per_tok") if kind == "qwen3_moe" else ()
    for name in REQUIRED + experts_too:
        if hf.get(name) is None:
            raise ValueError(f"weights: config.json has no {name}")
    h, v, d = hf["hidden_size"], hf["vocab_size"], head_dim(hf)
    q = hf["num_attention_heads"]
    groups = hf.get("num_key_value_heads") or q

    def whole(p: Tensor) -> Tensor:
        return p

    def of_group(start: int, stop: int) -> Callable[[Tensor], Tensor]:
        return lambda p: p.view(groups // tp, q // groups + 2, d, h)[:, start:stop]

    def half(i: int) -> Callable[[Tensor], Tensor]:
        return lambda p: p.view(2, -1, p.shape[-1])[i]

    yield Slot("model.embed_tokens.weight", "embedding.word_embeddings.weight", (v, h), 0, whole)
    for i in range(hf["num_hidden_layers"]):
        hf_layer, layer = f"model.layers.{i}.", f"decoder.layers.{i}."

        def slot(name, megatron, shape, axis=None, view=whole, hf_layer=hf_layer, layer=layer):
            return Slot(f"{hf_layer}{name}.weight", f"{layer}{megatron}.weight", shape, axis, view)

        attention, qkv = "self_attention.", "self_attention.linear_qkv"
        yield slot("input_layernorm", "input_layernorm", (h,))
        yield slot("self_attn.q_proj", qkv, (q * d, h), 0, of_group(0, q // groups))
        yield slot("self_attn.k_proj", qkv, (groups * d, h), 0, of_group(-2, -1))
        yield slot("self_attn.v_proj", qkv, (groups * d, h), 0, of_group(-1, None))
        yield slot("self_attn.o_proj", attention + "linear_proj", (h, q * d), 1)
        if kind != "llama":
            yield slot("self_attn.q_norm", attention + "q_layernorm", (d,))
            yield slot("self_attn.k_norm", attention + "k_layernorm", (d,))
        yield slot("post_attention_layernorm", "pre_mlp_layernorm", (h,))
        if kind == "qwen3_moe":
            f, E = hf["moe_intermediate_size"], experts(hf)
            yield slot("mlp.gate", "mlp.router", (E, h))
            blocks = [(f"mlp.experts.{e}.", f"mlp.experts.local_experts.{e}.") for e in range(E)]
            row, column = None, None  # experts are split by number, not inside
        else:
            f, blocks, row, column = hf["intermediate_size"], [("mlp.", "mlp.")], 0, 1
        for name, megatron in blocks:
            yield slot(name + "gate_proj", megatron + "linear_fc1", (f, h), row, half(0))
            yield slot(name + "up_proj", megatron + "linear_fc1", (f, h), row, half(1))
            yield slot(name + "down_proj", megatron + "linear_fc2", (h, f), column)
    yield Slot("model.norm.weight", "decoder.final_layernorm.weight", (h,), None, whole)
    if not hf.get("tie_word_embeddings"):
        yield Slot("lm_head.weight", "output_layer.weight", (v, h), 0, whole)


def names(hf: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint and its shape, in the order of the file."""
    return {slot.hf: slot.shape for slot in rules(hf)}


class WeightsError(ValueError):
    """Tensors that do not fit the model; the message is one sentence that names the tensor."""


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module)."""
    while hasattr(model, "module"):
        model = model.module
    return model


def local_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters under the names of `rules`: global layers and experts, local spec."""
    from megatron.core import parallel_state

    found, model = {}, unwrap(model)
    first = parallel_state.get_expert_model_parallel_rank() * (
        (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    )
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(first + int(parts[at]))
        elif "experts" in parts and parts[-1].startswith("weight"):  # grouped: linear_fc1.weight{j}
            at = parts.index("experts") + 1
            parts[at:at] = ["local_experts", str(first + int(parts[-1].removeprefix("weight")))]
            parts[-1] = "weight"
        elif parts[-1] == "layer_norm_weight":  # Transformer Engine's norm inside the linear layer
            norm = {"linear_qkv": "input_layernorm", "linear_fc1": "pre_mlp_layernorm"}[parts[-2]]
            parts = [*parts[:3], norm, "weight"]
        found[".".join(parts)] = parameter
    return found


def load(model: torch.nn.Module, tensors: Named) -> None:
    """Copy a full checkpoint into a model of `scaleup.model.build`, whatever its layout.

    `tensors` are pairs of Hugging Face name and full tensor, or a mapping, in any order; every rank
    passes all of them and keeps its share. Values are converted to the dtype of the parameter. A
    tied checkpoint may also hold lm_head.weight, if it equals the embedding. An optimizer that
    keeps float32 copies must read them again (Megatron: `optimizer.reload_model_params()`).

    Raises WeightsError for a name the model has not, a wrong shape, a tensor that comes twice or
    not at all. The check is the same on every rank; a model whose load failed is partly written.
    """
    from megatron.core import parallel_state

    model = unwrap(model)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    parameters = local_parameters(model)
    slots = {slot.hf: slot for slot in rules(model.hf, tp)}
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied, copies = head not in slots, {}
    filled = {slot.megatron for slot in slots.values()} | {"output_layer.weight"}
    if alone := set(parameters) - filled:
        raise WeightsError(f"weights: no tensor fills the parameter {min(alone)!r} of this model")
    seen = set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if tied and name in (embedding, head):
            copies[name] = digest(tensor)
            if name == head:
                continue
        if name not in slots:
            raise WeightsError(f"weights: the model has no tensor {name!r}")
        if name in seen:
            raise WeightsError(f"weights: {name!r} came twice")
        seen.add(name)
        slot = slots[name]
        if tuple(tensor.shape) != slot.shape:
            raise WeightsError(
                f"weights: {name!r} has shape {tuple(tensor.shape)}, the model needs {slot.shape}"
            )
        if slot.axis is not None and tp > 1:
            tensor = tensor.chunk(tp, slot.axis)[rank]
        targets = [slot.megatron, "output_layer.weight" if tied and name == embedding else None]
        for target in targets:
            if target in parameters:
                with torch.no_grad():
                    part = slot.view(parameters[target])
                    part.copy_(tensor.reshape(part.shape))
    if missing := [name for name in slots if name not in seen]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(f"weights: {missing[0]!r}{more} did not come")
    if len(set(copies.values())) > 1:
        raise WeightsError(f"weights: the model is tied, but {head!r} is not the embedding")


def export(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The full checkpoint, in the order of the file: pairs of Hugging Face name and new tensor.

    Collective: every rank must run the iterator to its end and gets every tensor. At most the
    experts of one layer are held at once.
    """
    from megatron.core import parallel_state as mpu

    model = unwrap(model)
    parameters = local_parameters(model)
    tp_group, tp = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    ep_group, ep = mpu.get_expert_model_parallel_group(), mpu.get_expert_model_parallel_world_size()
    pp_group, pp = (
        mpu.get_pipeline_model_parallel_group(),
        mpu.get_pipeline_model_parallel_world_size(),
    )
    device = next(iter(parameters.values())).device
    dtypes = [{_any_expert(name): p.dtype for name, p in parameters.items()}]
    if pp > 1:
        mine, dtypes = dtypes[0], [None] * pp
        dist.all_gather_object(dtypes, mine, group=pp_group)

    def full(slots: list[Slot]) -> Iterable[Tensor]:
        """One dense tensor, or one kind of tensor of every expert of a layer."""
        slot, key = slots[0], _any_expert(slots[0].megatron)
        stage = next(i for i, known in enumerate(dtypes) if key in known)
        expert = key != slot.megatron
        shape = (len(slots), *slot.shape)
        if stage == mpu.get_pipeline_model_parallel_rank():
            local = (s for s in slots if s.megatron in parameters)
            split = expert or slot.axis is None
            form = slot.shape if split else _share(slot, tp)
            parts = [s.view(parameters[s.megatron].detach()).reshape(form) for s in local]
            here = torch.stack(parts)
            if expert:
                here = _gather(here, 0, ep, ep_group)
            elif slot.axis is not None:
                here = _gather(here, 1 + slot.axis, tp, tp_group)
        else:
            here = torch.empty(shape, dtype=dtypes[stage][key], device=device)
        if pp > 1:
            dist.broadcast(here, dist.get_global_rank(pp_group, stage), group=pp_group)
        return [t.clone() for t in here] if len(slots) > 1 else here  # no shared storage

    for block in _blocks(rules(model.hf, tp)):
        kinds: dict[str, list[Slot]] = {}
        for slot in block:
            kinds.setdefault(_any_expert(slot.hf), []).append(slot)
        tensors = {}
        for slots in kinds.values():
            tensors |= zip((s.hf for s in slots), full(slots), strict=True)
        for slot in block:
            yield slot.hf, tensors.pop(slot.hf)


def _any_expert(name: str) -> str:
    """The name with the number of the expert taken out."""
    parts = name.split(".")
    for word in ("experts", "local_experts"):
        if word in parts and (at := parts.index(word) + 1) < len(parts) and parts[at].isdigit():
            parts[at] = "*"
    return ".".join(parts)


def _blocks(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """The experts of one layer together, every other slot alone."""
    block: list[Slot] = []
    for slot in slots:
        expert = _any_expert(slot.hf) != slot.hf
        if block and not (expert and _any_expert(block[-1].hf) != block[-1].hf):
            yield block
            block = []
        block.append(slot)
    yield block


def _share(slot: Slot, tp: int) -> tuple[int, ...]:
    """Shape of one rank's share."""
    return tuple(n // tp if axis == slot.axis else n for axis, n in enumerate(slot.shape))


def _gather(x: Tensor, axis: int, n: int, group) -> Tensor:
    """The shares of all ranks of a group, side by side."""
    if n == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, axis)


def read_config(folder: str | Path) -> dict:
    """config.json of a checkpoint. Raises OSError, or ValueError where it is not JSON."""
    return json.loads((Path(folder) / "config.json").read_text())


def read(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint on disk, one after the other.

    Raises WeightsError where the folder has no safetensors file.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise WeightsError(f"weights: {folder} has no .safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  not a mapping
                yield name, stored.get_tensor(name)


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's dtype, shape and bits; on the host."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    found.update(data)
    return found.hexdigest()


def checksum(tensors: Named) -> str:
    """A hash of names, dtypes, shapes and bits, whatever the order; equal weights, equal checksum."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    lines = sorted(f"{name} {digest(tensor)}" for name, tensor in pairs)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
