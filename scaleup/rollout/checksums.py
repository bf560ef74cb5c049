"""What SGLang's checksum of each of its weights must be when a model is served."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from scaleup.models import families
from scaleup.models.families import Family


def expected_checksums(
    tensors: dict[str, Tensor], config: dict[str, Any], rank: int = 0, tp: int = 1
) -> dict[str, str]:
    """SGLang's checksum of each of its weights on tensor-parallel rank `rank` of `tp`, when
    `tensors` are served: sha256 over the bytes of the rows that SGLang fuses into one weight.

    Holds on a CPU with one rank, and with two where SGLang does not pad (it pads experts of 48 channels
    a rank). Layouts that a GPU kernel shuffles, and expert parallelism, are not covered.
    """
    family = families.family(config)
    groups: dict[str, list[tuple[tuple[int, int], Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        tied_head = name == "lm_head.weight" and config.get("tie_word_embeddings")
        if tied_head and family.shares_head:
            continue
        fused, order = _fused(name, family)
        groups[fused].append((order, _share(name, tensor, config, rank, tp)))
    sums = {}
    for fused, parts in groups.items():
        digest = hashlib.sha256()
        for _, part in sorted(parts, key=lambda p: p[0]):
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy())
        sums[fused] = digest.digest()[:8].hex()
    return sums


def _fused(name: str, family: Family) -> tuple[str, tuple[int, int]]:
    """SGLang's name of the weight that holds a Hugging Face one, and the place in it."""
    *words, kind, end = name.split(".")  # weight or bias
    stem = ".".join(words)
    if ".experts." in name:
        stem, _, e = stem.rpartition(".")
        if kind == "down_proj":
            return f"{stem}.w2_weight", (int(e), 0)
        return f"{stem}.w13_weight", (int(e), int(kind == "up_proj"))
    for fused, parts in family.fused:
        if kind in parts:
            return f"{stem}.{fused}.{end}", (0, parts.index(kind))
    return name, (0, 0)


def _share(name: str, tensor: Tensor, config: dict[str, Any], rank: int, tp: int) -> Tensor:
    """The part of a weight on a rank."""
    kind = name.split(".")[-2]
    if kind in ("embed_tokens", "lm_head"):  # padded to full rows of 64 tokens
        padding = torch.zeros(-len(tensor) % 64, *tensor.shape[1:], dtype=tensor.dtype)
        return torch.cat([tensor, padding]).chunk(tp)[rank]
    if kind in ("k_proj", "v_proj") and tp > (heads := families.kv_heads(config)):
        return tensor.chunk(heads)[rank * heads // tp]
    if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return tensor.chunk(tp)[rank]
    if kind in ("o_proj", "down_proj"):
        return tensor.chunk(tp, dim=1)[rank]
    return tensor
