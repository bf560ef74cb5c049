"""Linear logits on fixed random features of the state: states share parameters."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def init(rng: np.random.Generator, *, states: int, features: int, vocab: int) -> dict:
    """Zero weights [F, V]."""
    return {"W": np.zeros((features, vocab))}


def logits(w: dict[str, Tensor], X: Tensor, router=None) -> Tensor:
    """X W: [L, S, F] x [L, F, V] -> [L, S, V]."""
    return X @ w["W"]
