"""The optimizer of a run, and its clip of the gradient norm, lane by lane."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from simlab.study.settings import Training


def make_optimizer(how: Training, w: dict[str, Tensor]) -> torch.optim.Optimizer:
    """The optimizer that the settings name, over weights of all lanes."""
    if how.optimizer == "sgd":
        return torch.optim.SGD(list(w.values()), lr=how.lr, foreach=True)
    return torch.optim.Adam(list(w.values()), lr=how.lr, betas=(0.9, 0.98), foreach=True)


class LayerClip:
    """LayerClip: g_l <- g_l min(1, alpha R_l / |g_l|), R_l the mean norm of a layer so far, this step's included.

    Source: GradLoc and LayerClip (Tencent's blog, 2026), whose alpha and EMA were not read: `alpha` has no
    default, and the mean is over all steps whose norm was finite. A layer is an entry of the weights.
    """

    def __init__(self, alpha: float):
        self.alpha = alpha
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # of norms and of steps, each `[L]`

    def __call__(self, w: dict[str, Tensor]) -> None:
        """Scale the gradients of w `[L, ...]` in place, lane by lane; one that is not finite stays so."""
        if self.alpha == math.inf:
            return
        for name, x in w.items():
            norm = x.grad.flatten(1).square().sum(-1).sqrt()
            total, steps = self.sums.get(name, (torch.zeros_like(norm),) * 2)
            finite = norm.isfinite()
            total, steps = total + torch.where(finite, norm, 0.0), steps + finite
            self.sums[name] = total, steps
            limit = self.alpha * total / steps.clamp(min=1)
            scale = torch.where(norm > limit, limit / norm, 1.0)
            x.grad.mul_(torch.where(finite, scale, 1.0).view(-1, *[1] * (x.dim() - 1)))


def clip_gradients(w: dict[str, Tensor], limit: float) -> tuple[Tensor, Tensor]:
    """Gradient norm of each lane `[L]` and whether it is finite; where it is not, a lane's is 0."""
    grads = [x.grad for x in w.values()]
    norm = sum(g.flatten(1).square().sum(-1) for g in grads).sqrt()
    finite = torch.isfinite(norm)
    if limit == math.inf and finite.all():
        return norm, finite
    scale = (limit / norm.clamp(min=1e-12)).clamp(max=1)
    for g in grads:
        lane = (-1, *[1] * (g.dim() - 1))
        g.copy_(torch.where(finite.view(lane), g * scale.view(lane), 0.0))
    return norm, finite
