"""Model families: what sets each apart, one record a family. Everything else reads the records.

    family(hf).qk_norm              # hf is the config.json of a checkpoint
    check(hf)                       # ValueError in one sentence for a model that would be built wrongly
    check_layout(hf, tp=2, ep=2)    # the same for a model that ranks cannot share so

All families are decoders like Llama: an RMSNorm before attention and before the MLP, rotary
positions, keys that several queries share, SiLU gates. `scaleup.models.slots` maps their weights,
`scaleup.models.megatron` builds them, `scaleup.models.tiny` writes small ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
EXPERTS_REQUIRED = ("moe_intermediate_size", "num_experts_per_tok")
ONLY = {"hidden_act": "silu", "quantization_config": None}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart from Llama."""

    architecture: str
    """The class in transformers and SGLang."""
    only: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json with the one value that is built, beside ONLY; a field may be left out."""
    head_dim: int | None = None
    """Channels of an attention head where config.json has none; None: hidden_size / heads."""
    moe: bool = False
    """Every layer is a mixture of experts."""
    qk_norm: bool = False
    """Each head of queries and keys is normalised, with one weight for all of them."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    fused: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    )
    """SGLang's name of a linear layer, and the checkpoint's layers in it, in this order."""
    shares_head: bool = True
    """SGLang keeps a head that is tied and the embedding as one tensor."""
    tiny: Mapping[str, object] = field(default_factory=dict)
    """More fields of the config.json of a tiny model, beside `only` and the sizes."""


FAMILIES = {  # by model_type
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        only={
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        moe=True,
        qk_norm=True,
        shares_head=False,
        tiny={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.0,
            "sliding_window": None,
        },
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        only={"attention_bias": False, "use_sliding_window": False},
        head_dim=128,
        qk_norm=True,
        tiny={"sliding_window": None},
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        only={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Family(  # Qwen2 and Qwen2.5, dense
        architecture="Qwen2ForCausalLM",
        only={"use_sliding_window": False},
        qkv_bias=True,
        tiny={
            "sliding_window": None,
            "head_dim": None,
        },  # SGLang on a CPU takes hidden_size / heads
    ),
}


def family(hf: dict) -> Family:
    """The family of a config.json. Raises ValueError for one that is not known."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {kind!r} is not known, only {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def check(hf: dict) -> None:
    """Raises ValueError, naming the field of config.json, for a model that would be built wrongly."""
    record = family(hf)
    for name in REQUIRED + EXPERTS_REQUIRED * record.moe:
        if hf.get(name) is None:
            raise ValueError(f"config.json has no {name}")
    if record.moe and not experts(hf):
        raise ValueError("config.json has no num_experts")
    for name, value in (ONLY | dict(record.only)).items():
        if hf.get(name) not in (value, None):
            raise ValueError(f"config.json: {name} must be {value}, got {hf[name]}")


def check_layout(hf: dict, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Raises ValueError, naming the field, unless tensor, pipeline and expert parallel ranks can share it."""
    shares = (
        ("num_key_value_heads", kv_heads(hf), "tp", tp),
        ("vocab_size", hf["vocab_size"], "tp", tp),
        ("intermediate_size", hf["intermediate_size"], "tp", tp),
        ("num_hidden_layers", hf["num_hidden_layers"], "pp", pp),
        ("num_experts", experts(hf), "ep", ep),
    )
    for name, size, axis, ranks in shares:
        if size % ranks:
            raise ValueError(f"config.json: {name} {size} cannot be shared by {axis} {ranks}")
    if ep > 1 and not experts(hf):
        raise ValueError(f"config.json: a dense model has no experts for ep {ep}")


def head_dim(hf: dict) -> int:
    """Channels of an attention head."""
    given = hf.get("head_dim", family(hf).head_dim)
    return given or hf["hidden_size"] // hf["num_attention_heads"]


def kv_heads(hf: dict) -> int:
    """Heads of keys and values; each serves as many queries."""
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def experts(hf: dict) -> int:
    """Experts of a layer, 0 in a dense model; transformers 5 writes another name."""
    return hf.get("num_experts") or hf.get("num_local_experts") or 0


def narrow(count: int) -> torch.dtype:
    """The smallest integers that number so many experts."""
    return torch.uint8 if count <= 256 else torch.int16
