"""A radius that shrinks on gated tokens: the kernels, PPO's clip with a contracted radius, and the contraction
of any radius, the word `contract` of compositions: `dppo+contract`, `ppo+kl:coef=0.1+contract`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.quantile import Reduce, abs_quantile
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio, on_mask
from simlab.stabilizers.parts import Above0, Share, clipped

Shape = Literal["hill", "exponential", "linear"]
LEAST = 1e-3  # of c where it divides: a penalty becomes at most a thousand times as strong


def quantile(
    batches: Iterable[TokenBatch],
    *,
    alpha: Annotated[float, Interval("(0, 1]")] = 0.9,
    reduce: Reduce | None = None,
) -> Tensor:
    """q `[...]` of SAT's (14): the alpha-quantile of |d| over the active tokens of the optimizer batch."""
    return abs_quantile([(log_ratio(b).detach(), b.mask) for b in batches], alpha, reduce)


def factor_of_radius(
    b: TokenBatch,
    *,
    q: Tensor,
    exponent: Above0 = 2.0,
    factor: Share | None = None,
    shape: Shape = "hill",
) -> Tensor:
    """c `[..., N]` of SAT's (15), (16): 1 on tokens with |d| up to q, the kernel beyond."""
    u = log_ratio(b).detach().abs()
    q = torch.as_tensor(q, dtype=u.dtype, device=u.device).unsqueeze(-1)
    return torch.where((q > 0) & (u > q), kernel(u, q, exponent, factor, shape), 1.0)


def kernel(
    u: Tensor, q: Tensor, exponent: float, factor: float | None, shape: Shape = "hill"
) -> Tensor:
    """c `[..., N]`, read on gated tokens only: with x = (u/q)^exponent, hill is 1 / (1 + x),
    exponential 2^-x, linear max(1 - x/2, 0); each is 1/2 at u = q. `factor` is a constant instead."""
    if factor is not None:
        return torch.full_like(u, factor)
    x = (u / q).pow_(exponent)
    if shape == "hill":
        return x.add_(1).reciprocal_()
    return x.neg_().exp2_() if shape == "exponential" else x.mul_(-0.5).add_(1).clamp_(min=0)


def contracted(
    b: TokenBatch,
    d: Tensor,
    gate: Tensor,
    c: Tensor,
    eps_low: float,
    eps_high: float,
    W: Tensor | None = None,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO whose radius is c times as large on gated tokens, on the side of sign(d) only.

    `gate` is bool `[..., N]`, off where masked. Diagnostics are PPO's and the runtime quantities of
    the paper's Table 10: the mean contracted radii, the gate rate and the smallest c.
    """
    x = d.detach()
    # The end on the far side of 1 cannot bind, so one gate serves both ends; an ungated token gets
    # PPO's own constants, so that a closed gate changes no bit.
    one = c.new_ones(())
    low = torch.where(gate, torch.add(one, c, alpha=-eps_low), 1 - eps_low)
    high = torch.where(gate, torch.add(one, c, alpha=eps_high), 1 + eps_high)
    S, active, diagnostics = clipped(d, on_mask(b, b.advantage), low, high, W, dual_clip)
    diagnostics |= {
        "radius_low": Diagnostic(lambda: torch.where(x < 0, 1 - low, eps_low), "mean"),
        "radius_high": Diagnostic(lambda: torch.where(x > 0, high - 1, eps_high), "mean"),
        "gate_rate": Diagnostic(gate, "mean"),
        "c_min": Diagnostic(lambda: torch.where(gate, c, 1.0), "min"),
    }
    return Surrogate(S, active, diagnostics)
