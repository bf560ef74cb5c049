"""Weights between Hugging Face and Megatron-Core, and a checkpoint's files and hashes.

    load(model, read(folder))               # full tensors by Hugging Face names, on every rank
    for name, tensor in export(model): ...  # collective; full tensors, on every rank

`scaleup.models.slots` says where each tensor lies. With the parts of Transformer Engine the norms
before a linear layer and the experts have other names; both are known here, but only the local spec
has been run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from scaleup.models import slots
from scaleup.models.slots import Slot

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightsError(ValueError):
    """Tensors that do not fit the model; the message is one sentence that names the tensor."""


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module)."""
    while hasattr(model, "module"):
        model = model.module
    return model


def local_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters under the names of `slots`: global layers and experts, local spec."""
    from megatron.core import parallel_state

    parameters, model = {}, unwrap(model)
    first = parallel_state.get_expert_model_parallel_rank() * (
        (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    )
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            number = parts.index("local_experts") + 1
            parts[number] = str(first + int(parts[number]))
        elif "experts" in parts and parts[-1].startswith("weight"):  # grouped: linear_fc1.weight{j}
            after, j = parts.index("experts") + 1, int(parts[-1].removeprefix("weight"))
            parts[after:after] = ["local_experts", str(first + j)]
            parts[-1] = "weight"
        elif parts[-1] == "layer_norm_weight":  # Transformer Engine's norm inside the linear layer
            norm = {"linear_qkv": "input_layernorm", "linear_fc1": "pre_mlp_layernorm"}[parts[-2]]
            parts = [*parts[:3], norm, "weight"]
        parameters[".".join(parts)] = parameter
    return parameters


def load(model: torch.nn.Module, tensors: Named) -> None:
    """Copy a full checkpoint into a model of `megatron.build`, whatever its layout.

    `tensors` are pairs of Hugging Face name and full tensor, or a mapping, in any order; every rank
    passes all of them and keeps its share. Values are converted to the dtype of the parameter. A
    tied checkpoint may also hold lm_head.weight, if it equals the embedding. An optimizer that
    keeps float32 copies must read them again (Megatron: `optimizer.reload_model_params()`).

    Raises WeightsError for a name that the model does not have, a wrong shape, a tensor that comes
    twice or not at all. The check is the same on every rank; a model whose load failed is partly written.
    """
    from megatron.core import parallel_state

    model = unwrap(model)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    parameters = local_parameters(model)
    by_name = {slot.hf: slot for slot in slots.rules(model.hf, tp)}
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied, copies = head not in by_name, {}
    filled = {slot.megatron for slot in by_name.values()} | {"output_layer.weight"}
    if alone := set(parameters) - filled:
        raise WeightsError(f"weights: no tensor fills the parameter {min(alone)!r} of this model")
    seen = set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if tied and name in (embedding, head):
            copies[name] = digest(tensor)
            if name == head:
                continue
        if name not in by_name:
            raise WeightsError(f"weights: the model has no tensor {name!r}")
        if name in seen:
            raise WeightsError(f"weights: {name!r} came twice")
        seen.add(name)
        slot = by_name[name]
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
    if missing := [name for name in by_name if name not in seen]:
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

    def full(alike: list[Slot]) -> Iterable[Tensor]:
        """One dense tensor, or one kind of tensor of every expert of a layer."""
        slot, key = alike[0], _any_expert(alike[0].megatron)
        stage = next(i for i, known in enumerate(dtypes) if key in known)
        expert = key != slot.megatron
        shape = (len(alike), *slot.shape)
        if stage == mpu.get_pipeline_model_parallel_rank():
            local = (s for s in alike if s.megatron in parameters)
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
        return [t.clone() for t in here] if len(alike) > 1 else here  # no shared storage

    for block in _blocks(slots.rules(model.hf, tp)):
        kinds: dict[str, list[Slot]] = {}
        for slot in block:
            kinds.setdefault(_any_expert(slot.hf), []).append(slot)
        tensors = {}
        for alike in kinds.values():
            tensors |= zip((s.hf for s in alike), full(alike), strict=True)
        for slot in block:
            yield slot.hf, tensors.pop(slot.hf)


def _any_expert(name: str) -> str:
    """The name with the number of the expert taken out."""
    parts = name.split(".")
    for word in ("experts", "local_experts"):
        if word in parts and (i := parts.index(word) + 1) < len(parts) and parts[i].isdigit():
            parts[i] = "*"
    return ".".join(parts)


def _blocks(all_slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """The experts of one layer together, every other slot alone."""
    block: list[Slot] = []
    for slot in all_slots:
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
    hashed = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    hashed.update(data)
    return hashed.hexdigest()


def checksum(tensors: Named) -> str:
    """A hash of names, dtypes, shapes and bits, whatever the order; equal weights, equal checksum."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    lines = sorted(f"{name} {digest(tensor)}" for name, tensor in pairs)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
