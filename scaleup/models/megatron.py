"""Megatron-Core models from a Hugging Face config.json of a family of `scaleup.models.families`.

    layout = Layout(tp=2, ep=2)
    start(layout)                                   # parallel groups; torch.distributed is up
    model = build(weights.read_config(folder), layout)      # the GPTModel of this rank's pipeline stage
    weights.load(model, weights.read(folder))
    batch = packing.pack(sequences, multiple=layout.tp)
    logits = model(batch.tokens, batch.positions, None, packed_seq_params=batch.params)

Logits are `[1, T, V/TP]`. The layers are Megatron's local spec with two parts of this file: a norm
that is legal under sequence parallelism, and causal attention that knows packed sequences. They run
on CPU and GPU; nothing here needs Transformer Engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scaleup.cpu import mcore
from scaleup.models import families

mcore.install()

from megatron.core import parallel_state  # noqa: E402  after the shim
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


@dataclass(frozen=True)
class Layout:
    """How the ranks of a world share a model; the rest of the world is data parallel.

    Expert tensor parallelism is 1. Sequence parallelism is on where tp > 1: Megatron's experts do
    not train without it.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        parts = [
            f"{name.upper()}{n}" for name in ("tp", "pp", "ep") if (n := getattr(self, name)) > 1
        ]
        return " ".join(parts) or "1"


STARTED: list[tuple] = []  # what the present groups were made for


def start(layout: Layout, seed: int = 0, **groups) -> None:
    """Make Megatron's parallel groups for this layout, in place of earlier ones, or keep those that
    fit: Megatron forgets groups without closing them, and gloo leaves three threads with each.

    `groups` are more arguments of Megatron's initialize_model_parallel. `torch.distributed` must be
    initialised. Raises ValueError where the world cannot be shared so.
    """
    world, used = torch.distributed.get_world_size(), layout.tp * layout.pp
    if world % used or (world // layout.pp) % layout.ep:
        raise ValueError(f"layout {layout} does not fit a world of {world} ranks")
    wanted = (torch.distributed.group.WORLD, layout, groups)
    if not parallel_state.is_initialized() or STARTED != [wanted]:
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            **groups,
        )
        STARTED[:] = [wanted]
    # the tracker without CUDA generators: dropout is 0, and layers may be built on a CPU
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)


def rope(hf: dict) -> dict:
    """The rotary fields of GPTModel. Raises ValueError for a scaling that Megatron has not."""
    stored = hf.get("rope_parameters") or {}  # transformers 5; before, two fields of their own
    scaling = stored or hf.get("rope_scaling") or {}
    base = stored.get("rope_theta") or hf.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    fields = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": 1.0}
    if kind == "llama3":
        fixed = {
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        }
        for name, value in fixed.items():  # Megatron has them as constants
            if scaling.get(name) != value:
                raise ValueError(
                    f"config.json: rope {name} must be {value}, got {scaling.get(name)}"
                )
        return fields | {"rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
    if kind != "default":
        raise ValueError(f"config.json: no rope scaling of type {kind!r}")
    return fields


def transformer_config(
    hf: dict, layout: Layout, dtype: torch.dtype = torch.float32, **overrides
) -> TransformerConfig:
    """Megatron's configuration; `overrides` are fields of TransformerConfig.

    Raises ValueError, naming the field of config.json, for a model that would be built wrongly or
    that the layout cannot share.
    """
    families.check(hf)
    families.check_layout(hf, layout.tp, layout.pp, layout.ep)
    family = families.family(hf)
    fields = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": families.kv_heads(hf),
        "kv_channels": families.head_dim(hf),
        "ffn_hidden_size": hf["intermediate_size"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.tp > 1,
        "variable_seq_lengths": layout.pp > 1,  # packed micro-batches differ in length
        "moe_token_dispatcher_type": "alltoall",
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": True,  # it also marks the weights that TP splits
        # fused kernels of Transformer Engine and apex
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
    }
    if family.moe:
        fields |= {
            "num_moe_experts": families.experts(hf),
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,  # it would pass by the routing replay
        }
    return TransformerConfig(**(fields | overrides))


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over TP under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class CausalAttention(MegatronModule):
    """Causal attention of whole sequences; of each packed sequence alone where they are packed.

    A mask that is passed is not read: padding on the right needs none.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_, packed_seq_params=None, **__
    ) -> Tensor:
        """`[s, b, heads, d]`, or packed `[t, heads, d]`, to `[s, b, heads * d]`, packed `[t, ...]`."""
        if packed_seq_params is None:
            x = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return x.permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(
            *(x.transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True
        )
        x = torch.cat([self._attend(*(x.unsqueeze(0) for x in part))[0] for part in parts], 1)
        return x.transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local layer with the two parts above."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


def build(
    hf: dict,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    layer: ModuleSpec | None = None,
    **overrides,
) -> GPTModel:
    """The GPTModel of this rank's pipeline stage, with weights to be loaded.

    `start(layout)` comes first. `overrides` are fields of TransformerConfig, such as
    `moe_enable_routing_replay=True` or `recompute_granularity="full"`. `device="meta"` builds shapes
    only. `layer` is another layer than `layer_spec`, such as that of Transformer Engine (its names
    are known to `scaleup.models.weights`; not run). The routers of an earlier model leave Megatron's list
    of routing replays. `model.hf` is the config.json.

    Raises ValueError as `transformer_config`.
    """
    if device is not None:
        overrides = {"use_cpu_initialization": True} | overrides
    config = transformer_config(hf, layout, dtype, **overrides)
    RouterReplay.clear_global_router_replay_instances()
    layers = [layer or layer_spec(config)] * get_num_layers_to_build(config)
    with torch.device(torch.cuda.current_device() if device is None else device):
        model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layers, layer_norm=Norm),
            vocab_size=hf["vocab_size"],
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
            **rope(hf),
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(torch.nan)  # a forward before the load shows
            if ".mlp.experts." in name:
                # Their gradients are summed over the expert data-parallel group at EP 1 too. Below
                # 0.19 Megatron takes the dense group there, which leaves out TP: wrong, no error.
                parameter.allreduce = False
    model.hf = hf
    return model
