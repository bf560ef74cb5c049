"""The engine samples from its top-k or top-p nucleus, renormalised; the trainer scores all tokens.

Every sampled token then has d = log(kept mass) <= 0 with no policy change, and the trainer's mass
outside the nucleus is never sampled: mu does not cover pi, and the TV identity of SAT (5) fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simlab.simulator.rng import Generators


def logits(z: Tensor, rng: Generators, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """-inf outside the nucleus; 0 and 1 keep everything. Raises ValueError for other ranges."""
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"truncate: needs top_k >= 0 and 0 < top_p <= 1, got {top_k}, {top_p}")
    order = z.argsort(dim=-1, descending=True, stable=True)
    p = torch.softmax(z, -1).gather(-1, order)
    place = torch.arange(z.shape[-1])
    keep = (p.cumsum(-1) - p < top_p) & (place < (top_k or z.shape[-1]))
    kept = torch.zeros_like(keep).scatter(-1, order, keep)
    return torch.where(kept, z, -torch.inf)
