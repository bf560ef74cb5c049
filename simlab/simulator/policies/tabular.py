"""A free logit per state and token. Nothing is shared, so nothing one state learns hurts another."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def init(rng: np.random.Generator, *, states: int, features: int, vocab: int) -> dict:
    """Zero logits [S, V]."""
    return {"z": np.zeros((states, vocab))}


def logits(w: dict[str, Tensor], X: Tensor, router=None) -> Tensor:
    """[L, S, V]; the features X are not read."""
    return w["z"]
