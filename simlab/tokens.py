"""The one record every loss reads, and the log-ratio that starts all of them.

Last axis = tokens, leading axes = independent lanes (configurations, seeds; none on a cluster).
Losses are decided on the log-ratio d and only exponentiate what was selected, so a masked NaN or
infinity never meets a multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

# exp(d) is held at exp(D_MAX) = 2.5e30 beyond this log-ratio: far outside any trust region, and a sum
# of 1e8 such tokens is finite in float32. Tokens beyond have no gradient and are counted as `overflow`.
D_MAX = 70.0

OPTIONAL = {
    "logp_prox": "the proximal log-prob (trainer before the step)",
    "entropy_mu": "the entropy of the rollout distribution",
    "version": "the weight version of each token",
}


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Sampled tokens of one optimizer batch, or of one micro-batch of it.

    Every field is `[..., N]`. `mask` is True on tokens that the policy sampled and may learn from;
    what stands elsewhere is never read. Example, one response of two tokens and a pad:
    `TokenBatch(logp=tensor([-1., -2., 0.]), logp_mu=tensor([-1.1, -2., 0.]),
    advantage=tensor([1., 1., 0.]), mask=tensor([True, True, False]),
    response=tensor([0, 0, 0]))`.

    Raises ValueError, naming the field, when shapes or dtypes do not fit.
    """

    logp: Tensor  # nats, log pi(token) of the policy in training; carries the gradient
    logp_mu: Tensor  # nats, log mu(token), mu = the distribution really drawn from
    advantage: Tensor  # reward units, usually group-normalised
    mask: Tensor  # bool
    response: Tensor  # int64, index of the response a token belongs to; any order
    logp_prox: Tensor | None = None  # nats, log-prob of the proximal policy, no gradient
    entropy_mu: Tensor | None = None  # nats, entropy of mu at the token's state
    version: Tensor | None = None  # int64, weight version that sampled the token
    n_responses: int | None = None  # 1 + the largest response index; found when not given

    def __post_init__(self):
        for field in fields(self)[:-1]:
            value = getattr(self, field.name)
            if value is not None and value.shape != self.logp.shape:
                raise ValueError(
                    f"TokenBatch.{field.name} has shape {tuple(value.shape)}, "
                    f"logp has {tuple(self.logp.shape)}"
                )
        if self.mask.dtype != torch.bool:
            raise ValueError(f"TokenBatch.mask must be bool, got {self.mask.dtype}")
        if self.response.dtype != torch.int64:
            raise ValueError(f"TokenBatch.response must be int64, got {self.response.dtype}")
        if self.n_responses is None:
            used = torch.where(self.mask, self.response, 0)
            top = int(used.max()) + 1 if used.numel() else 0
            object.__setattr__(self, "n_responses", max(top, 1))

    def need(self, name: str, method: str) -> Tensor:
        """An optional field, or a ValueError that says which method wanted it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{method} needs {name}, {OPTIONAL[name]}, and this batch has none")
        return value

    def take(self, index: Tensor) -> TokenBatch:
        """The tokens at `index` `[K]` of the last axis: a micro-batch, a shard, a permutation."""
        chosen = {
            f.name: getattr(self, f.name)[..., index]
            for f in fields(self)[:-1]
            if getattr(self, f.name) is not None
        }
        return replace(self, **chosen)

    def screen(self) -> tuple[TokenBatch, dict[str, Tensor]]:
        """Take tokens with a non-finite number out of the mask, and count them by field.

        A loss assumes finite input on active tokens. Whoever reads numbers from outside (an engine,
        a log) screens first and reports the counts `[...]`; a token bad in two fields counts twice.
        """
        counts, mask = {}, self.mask
        for name in ("logp", "logp_mu", "advantage", "logp_prox", "entropy_mu"):
            value = getattr(self, name)
            if value is not None:
                bad = self.mask & ~torch.isfinite(value)
                counts[name] = bad.sum(-1)
                mask = mask & ~bad
        return replace(self, mask=mask), counts


class Diagnostic(NamedTuple):
    """A per-token quantity to log, with the reducer that makes sense of it."""

    value: Tensor  # broadcastable to [..., N]
    reduce: str  # "mean" over active tokens, "min" or "max"


class Surrogate(NamedTuple):
    """What a stabilizer returns; the loss is minus the aggregate of S."""

    S: Tensor  # [..., N] per-token surrogate, to be maximised; 0 where masked
    # [..., N] bool, tokens whose log-prob receives a gradient from the sum of S; exact but for
    # rounding (r underflows below d = -103 in float32; shared advantages that cancel to 1e-8)
    active: Tensor
    diagnostics: dict[str, Diagnostic]


def widen(x: Tensor) -> Tensor:
    """float64 stays, every other float becomes float32: ratios are never formed in bf16."""
    return x if x.dtype == torch.float64 else x.float()


def on_mask(b: TokenBatch, x: Tensor) -> Tensor:
    """x in at least float32 where the mask is True, 0 elsewhere (value and gradient)."""
    return torch.where(b.mask, widen(x), 0.0)


def log_ratio(b: TokenBatch, num: Tensor | None = None, den: Tensor | None = None) -> Tensor:
    """d = log num - log den in nats `[..., N]`, 0 where masked; by default log pi - log mu."""
    num = b.logp if num is None else num
    den = b.logp_mu if den is None else den
    return on_mask(b, widen(num) - widen(den))


def ratio(d: Tensor) -> Tensor:
    """r = exp(d), held at exp(D_MAX) without gradient beyond D_MAX."""
    return d.clamp(max=D_MAX).exp()
