"""State that goes from one optimizer step to the next: passed in, returned, never kept here.

theta is a dict of weights `[L, ...]`, one slice a lane; lanes never mix and no gradient flows. An
`Ewma` of theta is the proximal policy of PPO-EWMA (2110.00641), to be stepped after every optimizer
step; with an automatic reset it is that of "missing old logits" (2605.12070). `ema` smooths a
number of the batch (a quantile). `scale_update` applies a learning-rate factor lane by lane (VCPO).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simlab.core.quantile import Reduce, summed
from simlab.core.tokens import TokenBatch


class Ewma(NamedTuple):
    """A bias-corrected moving average of weights: sum_k beta^(t-k) theta_k / sum_k beta^(t-k)."""

    weights: dict[str, Tensor]  # [L, ...]
    total: Tensor  # [L] float64, W = sum_k beta^(t-k)


@torch.no_grad()
def ewma_start(theta: dict[str, Tensor]) -> Ewma:
    """The average of one step: a copy of theta, W = 1."""
    first = next(iter(theta.values()))
    total = torch.ones(first.shape[0], dtype=torch.float64, device=first.device)
    return Ewma({name: x.detach().clone() for name, x in theta.items()}, total)


@torch.no_grad()
def ewma_step(state: Ewma, theta: dict[str, Tensor], beta: float) -> Ewma:
    """W <- beta W + 1, average <- average + (theta - average) / W. beta = 0 gives theta itself.

    The centre of mass is beta / (1 - beta) steps back. Raises ValueError unless 0 <= beta <= 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"ewma: beta must lie in [0, 1], got {beta}")
    total = beta * state.total + 1
    weights = {name: _mix(x, theta[name], 1 / total) for name, x in state.weights.items()}
    return Ewma(weights, total)


@torch.no_grad()
def ewma_reset_where(state: Ewma, theta: dict[str, Tensor], reset: Tensor) -> Ewma:
    """On lanes with reset `[L]` (bool) the average starts anew at theta; the others keep theirs.

    "Missing old logits" resets where `active_share` of the step just taken is below tau = 0.9.
    """
    weights = {n: torch.where(_lanes(reset, x), theta[n], x) for n, x in state.weights.items()}
    return Ewma(weights, torch.where(reset, 1.0, state.total))


def active_share(b: TokenBatch, active: Tensor) -> Tensor:
    """Share `[...]` of tokens that neither mask nor clip cut; `active` `[..., N]` is a Surrogate's.

    A token without advantage is cut by neither, and an empty batch has share 1.
    """
    n = b.mask.sum(-1)
    kept = (b.mask & (active | (b.advantage == 0))).sum(-1)
    return torch.where(n > 0, kept / n.clamp(min=1), 1.0)


def beta_for(window: float) -> float:
    """W / (W + 2): the centre of mass, W / 2, lies in the middle of a staleness window of W steps.

    Raises ValueError for a window below 0.
    """
    if not window >= 0:
        raise ValueError(f"beta_for: window must be at least 0, got {window}")
    return window / (window + 2)


@torch.no_grad()
def ema(previous: Tensor | None, value: Tensor, decay: float) -> Tensor:
    """decay * previous + (1 - decay) * value, both `[...]`; value itself at the first step (None).

    Raises ValueError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"ema: decay must lie in [0, 1), got {decay}")
    return value.detach() if previous is None else torch.lerp(previous, value, 1 - decay)


@torch.no_grad()
def cosine(
    now: dict[str, Tensor], before: dict[str, Tensor] | None, reduce: Reduce | None = None
) -> Tensor:
    """Cosine `[L]` of two gradients `[L, ...]` over all weights, float64: GAC's number (2603.01501).

    `reduce` sums `[3, L]` over ranks that hold parts of the weights each.

    Near 0 from step to step on fresh data, and high for long under staleness. NaN where there is no
    earlier gradient, or one of the two is 0 or not finite.
    """

    def dot(x: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
        products = [x[k].double() * y[k].double() for k in x]
        return torch.stack([z.reshape(len(z), -1).sum(-1) for z in products]).sum(0)

    if before is None:
        first = next(iter(now.values()))
        return torch.full((len(first),), torch.nan, dtype=torch.float64, device=first.device)
    dots = torch.stack([dot(now, before), dot(now, now), dot(before, before)])
    both, of_now, of_before = summed([dots], reduce)
    return both / (of_now * of_before).sqrt()


@torch.no_grad()
def scale_update(
    theta_before: dict[str, Tensor], theta_after: dict[str, Tensor], factor: Tensor
) -> None:
    """theta_after <- before + factor (after - before), in place, with one factor `[L]` a lane.

    What a learning rate times `factor` would have given: the steps of SGD and Adam, with momentum
    and weight decay, are linear in the learning rate and their state does not know it. theta_before
    are copies taken before the step. Factor 1 changes no bit; 0 undoes even a non-finite step.
    """
    for name, after in theta_after.items():
        after.copy_(_mix(theta_before[name], after, factor))


def _mix(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    """start + share (end - start) by lane; at 0 and 1 exact, whatever the other end holds."""
    share = _lanes(share, start).to(start.dtype)
    mixed = torch.lerp(start, end, share)
    return torch.where(share == 1, end, torch.where(share == 0, start, mixed))


def _lanes(x: Tensor, like: Tensor) -> Tensor:
    """x `[L]` with the dimensions of like `[L, ...]`."""
    return x.view(-1, *[1] * (like.dim() - 1))
