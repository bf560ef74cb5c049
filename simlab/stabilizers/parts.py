"""What several methods are made of: ranges of arguments, the clip, contraction, bands, responses."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from simlab.core.arguments import Interval
from simlab.core.per_response import response_means
from simlab.core.tokens import (
    LOG_RATIO_CAP,
    Diagnostic,
    Surrogate,
    TokenBatch,
    graded,
    ratio,
)

# what many hyper-parameters may be: see core/arguments.py
Share = Annotated[float, Interval("[0, 1]")]
AtLeast0 = Annotated[float, Interval("[0, inf]")]
Above0 = Annotated[float, Interval("(0, inf]")]  # a cap among them: inf lifts it
RadiusLow = Share  # the clip is [1 - eps_low, 1 + eps_high]
RadiusHigh = Annotated[float, Interval("[0, inf)")]
DualClip = Annotated[float, Interval("(1, inf]")] | None
BandLow = Annotated[float, Interval("[0, inf)")]
BandHigh = Above0
Level = Literal["token", "sequence"]
HELD = math.exp(LOG_RATIO_CAP)  # the largest weight of a token


def clipped(
    d: Tensor,
    A: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    weight: Tensor | None = None,
    dual_clip: float | Tensor | None = None,
) -> Surrogate:
    """weight min(r A, clip(r, low, high) A) for r = exp(d): the one clip of every method.

    Limits and weight (1 if not given, 0 drops a token) are constants without gradient. A token whose ratio, or ratio times weight, is beyond exp(LOG_RATIO_CAP) is held at exp(LOG_RATIO_CAP) |A|, has no
    gradient and counts as `overflow`.
    Minimum and clip are vector instructions, selections are not; that is why there are few.
    """
    with torch.no_grad():
        r = ratio(d)
        plain = r * A
        clip = r.clamp(low, high)  # pyright: ignore[reportCallIssue, reportArgumentType]
        S = plain.minimum(clip.mul_(A))
        if dual_clip is not None:
            S = torch.where(A < 0, S.maximum(dual_clip * A), S)
        far = d > LOG_RATIO_CAP
        constant = (S != plain) | far
        if weight is not None:
            S = S.mul_(weight)
            limit = A.abs() * HELD
            beyond = S.abs() > limit
            S, far = torch.where(beyond, S.sign() * limit, S), far | beyond
        w = torch.where(constant | far, 0.0, S)
    shares = {
        "clip_high": lambda: (A > 0) & (r > high),
        "clip_low": lambda: (A < 0) & (r < low),
        "overflow": lambda: far,
    }
    if dual_clip is not None:
        shares["clip_dual"] = lambda: (A < 0) & (r > dual_clip)
    diagnostics = {name: Diagnostic(share, "mean") for name, share in shares.items()}
    return Surrogate(graded(d, S, w), w != 0, diagnostics)


def check_band(method: str, low: float, high: float) -> None:
    """Raises ValueError unless low <= high."""
    if not low <= high:
        raise ValueError(f"{method}: the band needs low <= high, got {low}, {high}")


def in_band(d: Tensor, low: float, high: float) -> Tensor:
    """low <= exp(d) <= high, tested on the log-ratio, where a limit is not a matter of rounding."""
    return (d >= (math.log(low) if low else -math.inf)) & (d <= math.log(high))


def share_gradient(b: TokenBatch, active: Tensor, S: Tensor) -> Tensor:
    """Tokens reached when each response's gradient is spread over its tokens: `[..., N]` bool.

    S, where active, is the gradient weight that `clipped` gives to the mean log-ratio. The sum over
    the response is taken as its backward pass takes it, so that terms that cancel do so in both.
    """
    return response_means(b, torch.where(active, S.detach(), 0)) != 0
