"""Where each Hugging Face tensor lies in Megatron-Core's parameters.

Every tensor of a checkpoint is, up to its split over ranks, a view of a Megatron parameter:

    Megatron (local spec)                      Hugging Face                       split over
    embedding.word_embeddings.weight           model.embed_tokens.weight          TP, rows
    decoder.layers.i.input_layernorm           model.layers.i.input_layernorm
      self_attention.linear_qkv, its bias        self_attn.{q,k,v}_proj           TP, KV groups
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

linear_qkv holds, for each KV group, the queries of the group, its key and its value. A layer's number
under PP is its global number. Which lines a family has, says its record in `scaleup.models.families`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from scaleup.models import families


class Slot(NamedTuple):
    """One Hugging Face tensor inside one Megatron parameter of this rank."""

    hf: str
    megatron: str  # the parameter's name in the local spec, layers and experts by global number
    shape: tuple[int, ...]  # of the full Hugging Face tensor
    axis: int | None  # its axis that is split over TP, None where every rank holds it whole
    view: Callable[[Tensor], Tensor]  # parameter -> the part that is this tensor's share, a view


def rules(hf: dict, tp: int = 1) -> Iterator[Slot]:
    """The slots of the whole model of config.json `hf`, in the order of its file.

    `tp` ranks share a dense layer; the views are of one rank's parameter. Raises ValueError as
    `families.check`.
    """
    families.check(hf)
    h, v = hf["hidden_size"], hf["vocab_size"]
    layer = [*_attention(hf, tp), *_mlp(hf)]
    yield Slot("model.embed_tokens.weight", "embedding.word_embeddings.weight", (v, h), 0, _whole)
    for i in range(hf["num_hidden_layers"]):
        for slot in layer:
            yield slot._replace(
                hf=f"model.layers.{i}.{slot.hf}", megatron=f"decoder.layers.{i}.{slot.megatron}"
            )
    yield Slot("model.norm.weight", "decoder.final_layernorm.weight", (h,), None, _whole)
    if not hf.get("tie_word_embeddings"):
        yield Slot("lm_head.weight", "output_layer.weight", (v, h), 0, _whole)


def names(hf: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint and its shape, in the order of the file."""
    return {slot.hf: slot.shape for slot in rules(hf)}


def _attention(hf: dict, tp: int) -> Iterator[Slot]:
    """The norm before attention, and attention; names inside the layer."""
    h, d, family = hf["hidden_size"], families.head_dim(hf), families.family(hf)
    heads, groups = hf["num_attention_heads"], families.kv_heads(hf)
    queries = heads // groups  # of a KV group

    def of_group(start: int, stop: int | None) -> Callable[[Tensor], Tensor]:
        return lambda p: p.view(groups // tp, queries + 2, d, *p.shape[1:])[:, start:stop]

    yield _slot("input_layernorm", "input_layernorm", (h,))
    for name, size, view in (
        ("self_attn.q_proj", heads * d, of_group(0, queries)),
        ("self_attn.k_proj", groups * d, of_group(-2, -1)),
        ("self_attn.v_proj", groups * d, of_group(-1, None)),
    ):
        yield _slot(name, "self_attention.linear_qkv", (size, h), 0, view)
        if family.qkv_bias:
            yield _slot(name, "self_attention.linear_qkv", (size,), 0, view, "bias")
    yield _slot("self_attn.o_proj", "self_attention.linear_proj", (h, heads * d), 1)
    if family.qk_norm:
        yield _slot("self_attn.q_norm", "self_attention.q_layernorm", (d,))
        yield _slot("self_attn.k_norm", "self_attention.k_layernorm", (d,))


def _mlp(hf: dict) -> Iterator[Slot]:
    """The norm before the MLP, and the MLP, or its router and experts; names inside the layer."""
    h = hf["hidden_size"]
    yield _slot("post_attention_layernorm", "pre_mlp_layernorm", (h,))
    if families.family(hf).moe:
        f, count = hf["moe_intermediate_size"], families.experts(hf)
        yield _slot("mlp.gate", "mlp.router", (count, h))
        blocks = [(f"mlp.experts.{e}.", f"mlp.experts.local_experts.{e}.") for e in range(count)]
        row, column = None, None  # experts are split by number, not inside
    else:
        f, blocks, row, column = hf["intermediate_size"], [("mlp.", "mlp.")], 0, 1
    for name, megatron in blocks:
        yield _slot(name + "gate_proj", megatron + "linear_fc1", (f, h), row, _half(0))
        yield _slot(name + "up_proj", megatron + "linear_fc1", (f, h), row, _half(1))
        yield _slot(name + "down_proj", megatron + "linear_fc2", (h, f), column)


def _whole(parameter: Tensor) -> Tensor:
    return parameter


def _half(i: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter.view(2, -1, parameter.shape[-1])[i]


def _slot(hf: str, megatron: str, shape: tuple, axis=None, view=_whole, end="weight") -> Slot:
    return Slot(f"{hf}.{end}", f"{megatron}.{end}", shape, axis, view)
