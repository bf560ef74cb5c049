"""SAT: S = min(r A, clip(r, 1 - eps_low c_-, 1 + eps_high c_+) A), a radius that shrinks on the tail.

Source: Yang et al. 2026 (2607.18722), equations (13)-(20).

d = log(pi/mu), u = |sg d|, q = the alpha-quantile of u over the active tokens of the optimizer batch
(inverse CDF, (14)), and

    c = 1 / (1 + (u/q)^2)  if q > 0 and u > q  else 1           (15), (16)

c_+ is c for d > 0 and c_- is c for d < 0; the other end keeps PPO's radius (17)-(19). At level
"sequence" (20) the mean log-ratio of the response replaces d in both places (SAT-GSPO), while q
still ranges over tokens.

Gradient weight: r A (at level "sequence" the response mean of rho A, as GSPO), 0 where the
contracted clip or the dual clip (ppo.py) binds. d, q and c are constants. q = 0 is PPO bit for bit.

The paper says "batch" in one place and "microbatch" in another; here q is an argument, computed by
`whole_batch` over whatever the caller hands in. `ema` mixes in the q of the step before, for a
trainer that cannot afford a pass ahead of the step. Other shapes of the kernel than (15) and a
dual clip are not in the paper. Its runs use eps 0.2/0.2 at both levels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.per_response import response_means
from simlab.core.quantile import Reduce, abs_quantile
from simlab.core.state import ema as smooth
from simlab.core.tokens import Diagnostic, Surrogate, TokenBatch, log_ratio
from simlab.stabilizers.contraction import Shape, contracted, kernel
from simlab.stabilizers.parts import (
    Above0,
    DualClip,
    Level,
    RadiusHigh,
    RadiusLow,
    Share,
    share_gradient,
)


def score(b: TokenBatch, level: str) -> Tensor:
    """d `[..., N]` in nats: the token's log-ratio, or the mean log-ratio of its response."""
    d = log_ratio(b)
    return response_means(b, d) if level == "sequence" else d


def whole_batch(
    batches: Iterable[TokenBatch],
    *,
    alpha: Annotated[float, Interval("(0, 1]")] = 0.9,
    level: Level = "token",
    ema: Annotated[float, Interval("[0, 1)")] = 0.0,
    reduce: Reduce | None = None,
    previous: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """{"q": `[...]`} of (14), exact over micro-batches and, through `reduce`, over ranks.

    With `ema` the answer is ema * (q of `previous`, the last step's answer) + (1 - ema) * q.
    """
    q = abs_quantile([(score(b, level), b.mask) for b in batches], alpha, reduce)
    return {"q": smooth(previous["q"] if previous else None, q, ema)}


def surrogate(
    b: TokenBatch,
    *,
    q: Tensor | float,
    eps_low: RadiusLow = 0.2,
    eps_high: RadiusHigh = 0.2,
    exponent: Above0 = 2.0,
    factor: Share | None = None,
    shape: Shape = "hill",
    level: Level = "token",
    dual_clip: DualClip = None,
    W: Tensor | None = None,
) -> Surrogate:
    """SAT given q `[...]`. W `[..., N]` multiplies S. `factor` replaces the kernel by one constant c in [0, 1] on gated tokens.

    Diagnostics are those of `contracted`, and q.
    """
    d = score(b, level)
    u = d.detach().abs()
    q = torch.as_tensor(q, dtype=d.dtype, device=d.device).unsqueeze(-1)
    c = kernel(u, q, exponent, factor, shape)
    gate = (q > 0) & (u > q)
    S, active, diagnostics = contracted(b, d, gate, c, eps_low, eps_high, W, dual_clip)
    if level == "sequence":
        active = share_gradient(b, active, S)
    return Surrogate(S, active, diagnostics | {"q": Diagnostic(q, "max")})
