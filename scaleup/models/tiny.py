"""Tiny random models as Hugging Face checkpoints: small enough for a test, of a real architecture.

    folder = write("runs/tiny", "qwen3_moe", seed=0)

writes `config.json` and `model.safetensors`, float32. There is no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from scaleup.models import slots
from scaleup.models.families import FAMILIES

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # 4 heads of 32 are not the hidden size: a mapping that mixes them up shows
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "torch_dtype": "float32",
}
DEFAULTED = ("num_key_value_heads", "head_dim")  # where None, readers derive them


def config(kind: str = "qwen3_moe", *, tie: bool | None = None, **sizes) -> dict:
    """The config.json of a tiny model; `sizes` replaces fields of it, `tie` defaults to untied.

    Raises ValueError for an unknown kind, and for a size that is no whole number above 0.
    """
    if kind not in FAMILIES:
        raise ValueError(f"tiny: unknown kind {kind!r}, choose from {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    fields = {"model_type": kind, "architectures": [family.architecture]}
    fields |= {**SIZES, **family.only, **family.tiny, "tie_word_embeddings": bool(tie)}
    for name in DEFAULTED:
        if fields[name] is None:
            del fields[name]
    for name, size in sizes.items():
        whole = type(fields.get(name)) is int
        absent = size is None and name in DEFAULTED
        if whole and not absent and not (type(size) is int and size > 0):
            raise ValueError(f"tiny: {name} must be a whole number above 0, got {size!r}")
    return fields | sizes


def tensors(hf: dict, seed: int = 0, std: float = 0.1) -> dict[str, torch.Tensor]:
    """Random float32 tensors under the names of config `hf`: N(0, std), norms N(1, std)."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=draw) * std + (1.0 if "norm" in name else 0.0)
        for name, shape in slots.names(hf).items()
    }


def write(
    folder: str | Path,
    kind: str = "qwen3_moe",
    seed: int = 0,
    tie: bool | None = None,
    std: float = 0.1,
    **sizes,
) -> Path:
    """Write the checkpoint and return its folder; existing files are replaced."""
    hf, folder = config(kind, tie=tie, **sizes), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    save_file(tensors(hf, seed, std), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
