"""Sequences of several lengths side by side in one row, as `scaleup.models.megatron` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scaleup.cpu import mcore

mcore.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402  after the shim


class Packed(NamedTuple):
    """Sequences side by side, one micro-batch."""

    tokens: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, from 0 in each sequence
    lengths: list[int]  # of the sequences; the padding is what T has beyond their sum
    params: PackedSeqParams


def pack(sequences: Sequence[Sequence[int] | Tensor], multiple: int = 1, device=None) -> Packed:
    """Put sequences of token ids in one row, its length padded to a multiple (TP) of the layout.

    The padding is a sequence of its own with token 0: no other token attends to it.
    """
    rows = [torch.as_tensor(s, dtype=torch.int64, device=device) for s in sequences]
    lengths = [len(row) for row in rows]
    if pad := -sum(lengths) % multiple:
        rows.append(rows[0].new_zeros(pad))
    sizes = [len(row) for row in rows]
    ends = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
    )
    positions = torch.cat([torch.arange(n, device=device) for n in sizes])
    return Packed(torch.cat(rows)[None], positions[None], lengths, params)
