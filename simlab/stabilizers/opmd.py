"""OPMD: S = A log pi / (1 + tau), the simple form of online policy mirror descent.

Source: Trinity-RFT (opmd, tau 1), from its code.

No log-ratio is left in this form: it is the plain policy gradient at another learning rate, and changes nothing
under an optimizer that divides by the gradient's size.

Gradient weight on grad log pi: A / (1 + tau).
"""

from __future__ import annotations

from typing import Annotated

from simlab.core.arguments import Interval
from simlab.core.tokens import Surrogate, TokenBatch, on_mask, weighted


def surrogate(b: TokenBatch, *, tau: Annotated[float, Interval("[0, inf)")] = 1.0) -> Surrogate:
    """Rollout log-probs are not read."""
    return weighted(b, on_mask(b, b.advantage) / (1 + tau), {})
