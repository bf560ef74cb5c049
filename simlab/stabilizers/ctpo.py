"""CTPO: S = min(rho A, clip(rho, exp(-e_low t^h), exp(e_high t^h)) A), rho = exp(d_1 + ... + d_t), d = log(pi/mu).

Source: cumulative token policy optimization (2605.07331), official code. The paper's ratio is pi/pi_old.

The weight of a token is the ratio of its whole prefix, and the window widens in nats like the root of its place t,
as a random walk does. The gradient of rho goes through the token's own log-prob. The official code also has
a dual cap exp(dual t^h) for A < 0, which the paper's formula has not: `dual`, 0.05 there, None here. t
counts the active tokens of the response.

Gradient weight on grad log pi: rho A, 0 where the clip binds.
"""

from __future__ import annotations

from typing import Annotated

from simlab.core.arguments import Interval
from simlab.core.in_order import InOrder
from simlab.core.tokens import Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import clipped

Nats = Annotated[float, Interval("[0, inf)")]


def surrogate(
    b: TokenBatch,
    *,
    e_low: Nats = 0.025,
    e_high: Nats = 0.05,
    h: Nats = 0.5,
    dual: Annotated[float, Interval("(0, inf)")] | None = None,
) -> Surrogate:
    """Needs `position`."""
    d, order = log_ratio(b), InOrder(b, "ctpo")
    D = order.sums(d).to(d.dtype) + (d - d.detach())
    width = order.count().clamp(min=1).to(d.dtype) ** h
    cap = None if dual is None else (dual * width).exp()
    A = on_mask(b, b.advantage)
    return clipped(D, A, (-e_low * width).exp(), (e_high * width).exp(), dual_clip=cap)
