"""The engine holds its weights (or logits) on a coarser grid: bf16, or fp8-e4m3 scaled per tensor.

A rounded number moves by at most 2^-8 (bf16) or 2^-4 (e4m3, above its subnormals) of itself.
No randomness: the same weights always give the same engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.simulator.rng import Generators

LARGEST_E4M3 = 448.0


def cast(x: Tensor, dtype: str) -> Tensor:
    """x rounded to the grid, in its own dtype; lanes (axis 0) are scaled apart for e4m3."""
    if dtype == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    if dtype == "fp8":
        top = x.abs().flatten(1).amax(1).clamp(min=1e-12).view(-1, *[1] * (x.dim() - 1))
        scale = LARGEST_E4M3 / top
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
    raise ValueError(f"grid: dtype must be bf16 or fp8, got {dtype!r}")


def weights(w: dict, rng: Generators, *, dtype: str = "bf16", on: str = "weights") -> dict:
    """Every weight on the grid, when `on` is weights."""
    if on not in ("weights", "logits"):
        raise ValueError(f"grid: on must be weights or logits, got {on!r}")
    return {name: cast(x, dtype) for name, x in w.items()} if on == "weights" else w


def logits(z: Tensor, rng: Generators, *, dtype: str = "bf16", on: str = "weights") -> Tensor:
    """Every logit on the grid, when `on` is logits."""
    return cast(z, dtype) if on == "logits" else z
