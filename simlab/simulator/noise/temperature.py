"""The engine samples at temperature tau, the trainer scores at 1: mu is pi**(1/tau), renormalised.

A mistake of configuration rather than of arithmetic; it moves confident states most.
"""

from __future__ import annotations

from torch import Tensor

from simlab.simulator.rng import Generators


def logits(z: Tensor, rng: Generators, *, tau: float = 1.05) -> Tensor:
    """z / tau. Raises ValueError unless tau > 0."""
    if not 0 < tau < float("inf"):
        raise ValueError(f"temperature: tau must be above 0 and finite, got {tau}")
    return z / tau
