"""A small mixture of experts: random features -> top-1 router -> tanh expert -> logits.

With 24 features, 4 experts of 16 units and 8 tokens it has 2,144 parameters a lane. Shared
nonlinear parameters are what makes a policy collapse under lag, and a router is what makes an engine
disagree with its trainer in heavy tails. Experts are computed densely (they are tiny) and the gate,
softmax probability of the chosen expert and 0 elsewhere, picks one and carries the router's gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

EXPERTS, UNITS = 4, 16


def init(rng: np.random.Generator, *, states: int, features: int, vocab: int) -> dict:
    """Gaussian weights at fan-in scale; the output layer starts small."""
    hidden = EXPERTS * UNITS
    return {
        "router": rng.standard_normal((features, EXPERTS)) / np.sqrt(features),
        "up": rng.standard_normal((features, hidden)) / np.sqrt(features),
        "down": rng.standard_normal((hidden, vocab)) / np.sqrt(UNITS),
    }


def logits(w: dict[str, Tensor], X: Tensor, router=None) -> Tensor:
    """[L, S, V]; `router` maps router logits [L, S, E] to the ones an engine would see."""
    g = X @ w["router"]
    if router is not None:
        g = router(g)
    top, chosen = g.max(-1, keepdim=True)
    share = 1 / (g - top).exp().sum(-1, keepdim=True)  # softmax at the maximum
    gate = torch.zeros_like(g).scatter(-1, chosen, share)
    h = torch.tanh(X @ w["up"])
    h = h.unflatten(-1, (EXPERTS, UNITS)) * gate.unsqueeze(-1)
    return h.flatten(-2) @ w["down"]
