"""The one record every loss reads, and the log-ratio that starts all of them.

Last axis = tokens, leading axes = independent lanes (configurations, seeds; none on a cluster).
Losses are decided on the log-ratio d and only exponentiate what was selected, so a masked NaN or
infinity never meets a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

# exp(d) is held at exp(D_MAX) = 2.5e30 beyond this log-ratio: far outside any trust region, and a sum
# of 1e8 such tokens is finite in float32. Tokens beyond have no gradient and are counted as `overflow`.
D_MAX = 70.0

# Fields that only some methods read. Losses treat all of them as constants.
OPTIONAL = {
    "logp_prox": "the proximal log-prob (trainer before the step)",
    "logp_ref": "the log-prob of the frozen reference policy",
    "entropy_mu": "the entropy of the rollout distribution",
    "gini_mu": "the Gini index 1 - sum mu^2 of the rollout distribution",
    "age": "the optimizer steps since the weights that sampled the token",
    "stratum": "the class of the token (turn or position)",
    "uniform": "a uniform draw for each token",
    "tv": "the total variation between mu and pi at the token's state",
    "topk": "the log-probs of mu's likeliest tokens under pi",
    "topk_mu": "the log-probs of mu's likeliest tokens under mu",
}
TOP = ("topk", "topk_mu")  # [..., N, K]; everything else is [..., N]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Sampled tokens of one optimizer batch, or of one micro-batch of it.

    Every field is `[..., N]` (the top-k pair `[..., N, K]`). `mask` is True on tokens that the policy
    sampled and may learn from; what stands elsewhere is never read. Example, one response of two tokens and a pad:
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
    logp_prox: Tensor | None = None  # nats, log-prob of the proximal policy
    logp_ref: Tensor | None = None  # nats, log-prob of the reference policy of a KL term
    entropy_mu: Tensor | None = None  # nats, entropy of mu at the token's state
    gini_mu: Tensor | None = None  # 1 - sum_a mu(a)^2 at the token's state
    age: Tensor | None = None  # int64, optimizer steps since the weights that sampled the token
    stratum: Tensor | None = None  # int64, turn or position class, for conditioned quantiles
    uniform: Tensor | None = None  # in [0, 1), for methods that draw
    tv: Tensor | None = None  # (1/2) sum_a |pi - mu| at the token's state; a simulator knows it
    # nats, mu's K likeliest tokens under pi and under mu; -inf where that is the sampled token itself
    topk: Tensor | None = None
    topk_mu: Tensor | None = None
    n_responses: int | None = None  # 1 + the largest response index; found when not given

    def __post_init__(self):
        for name, value in self.held().items():
            shape = value.shape[:-1] if name in TOP else value.shape
            if shape != self.logp.shape:
                raise ValueError(
                    f"TokenBatch.{name} has shape {tuple(value.shape)}, "
                    f"logp has {tuple(self.logp.shape)}"
                )
        if self.mask.dtype != torch.bool:
            raise ValueError(f"TokenBatch.mask must be bool, got {self.mask.dtype}")
        if self.response.dtype != torch.int64:
            raise ValueError(f"TokenBatch.response must be int64, got {self.response.dtype}")
        if self.n_responses is None:
            used = torch.where(self.mask, self.response, 0)
            if used.numel() and int(used.min()) < 0:
                raise ValueError(f"TokenBatch.response is {int(used.min())} on a token of the mask")
            top = int(used.max()) + 1 if used.numel() else 0
            object.__setattr__(self, "n_responses", max(top, 1))

    def held(self) -> dict[str, Tensor]:
        """The fields that this batch has, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)[:-1]}
        return {name: x for name, x in found.items() if x is not None}

    def need(self, name: str, method: str) -> Tensor:
        """An optional field, or a ValueError that says which method wanted it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{method} needs {name}, {OPTIONAL[name]}, and this batch has none")
        return value

    def take(self, index: Tensor) -> TokenBatch:
        """The tokens at `index` `[K]` of the last axis: a micro-batch, a shard, a permutation."""
        axis = self.logp.dim() - 1
        return replace(self, **{k: x.index_select(axis, index) for k, x in self.held().items()})

    def screen(self) -> tuple[TokenBatch, dict[str, Tensor]]:
        """Take tokens with a non-finite number out of the mask, and count them by field.

        A loss assumes finite input on active tokens. Whoever reads numbers from outside (an engine,
        a log) screens first and reports the counts `[...]`; a token bad in two fields counts twice.
        """
        counts, mask = {}, self.mask
        for name, value in self.held().items():
            if value.is_floating_point():
                bad = ~torch.isfinite(value)
                if name in TOP:  # -inf stands for the sampled token itself
                    bad = (bad & (value != -torch.inf)).any(-1)
                bad = bad & self.mask
                counts[name] = bad.sum(-1)
                mask = mask & ~bad
        return replace(self, mask=mask), counts


def nothing(*shape: int) -> TokenBatch:
    """A batch `[*shape]` with every field and no active token: NaN everywhere, -1 in integers."""
    x, i = torch.full(shape, torch.nan), torch.full(shape, -1)
    optional = dict.fromkeys(OPTIONAL, x) | {"age": i, "stratum": i}
    optional |= dict.fromkeys(TOP, torch.full((*shape, 2), torch.nan))
    return TokenBatch(x, x, x, torch.zeros(shape, dtype=torch.bool), i, **optional)


class Diagnostic(NamedTuple):
    """A per-token quantity to log, with the reducer that makes sense of it."""

    # broadcastable to [..., N]; a function of no argument is called only when the value is wanted
    source: Tensor | Callable[[], Tensor]
    reduce: str  # "mean" over active tokens, "min" or "max"

    @property
    def value(self) -> Tensor:
        """The per-token quantity."""
        return self.source() if callable(self.source) else self.source


class Surrogate(NamedTuple):
    """What a stabilizer returns; the loss is minus the aggregate of S."""

    S: Tensor  # [..., N] per-token surrogate, to be maximised; 0 where masked
    active: Tensor  # [..., N] bool, tokens whose log-prob receives a gradient from the sum of S
    diagnostics: dict[str, Diagnostic]


class _Graded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, S: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return S.view_as(S)

    @staticmethod
    def backward(ctx, g: Tensor):
        (w,) = ctx.saved_tensors
        return g * w, None, None


def graded(x: Tensor, S: Tensor, w: Tensor) -> Tensor:
    """S `[..., N]` with the closed-form gradient dS/dx = w: formed with the value, in one pass.

    Half of the cost of a loss in eager mode is the chain of temporaries that autograd keeps. Values
    and weights are computed without it, and a test holds w against the derivative of S.
    """
    return _Graded.apply(x, S.detach(), w.detach())


def widen(x: Tensor) -> Tensor:
    """float64 stays, every other float becomes float32: ratios are never formed in bf16."""
    return x if x.dtype == torch.float64 else x.float()


def on_mask(b: TokenBatch, x: Tensor) -> Tensor:
    """x in at least float32 where the mask is True, 0 elsewhere (value and gradient)."""
    return torch.where(b.mask, widen(x), 0.0)


def weighted(b: TokenBatch, w: Tensor, diagnostics: dict[str, Diagnostic]) -> Surrogate:
    """S = sg[w] log pi, the policy-gradient form: w `[..., N]`, 0 where masked or dropped, is the
    gradient weight."""
    return Surrogate(w * on_mask(b, b.logp), w != 0, diagnostics)


def log_ratio(b: TokenBatch, num: Tensor | None = None, den: Tensor | None = None) -> Tensor:
    """d = log num - sg[log den] in nats `[..., N]`, 0 where masked; by default log pi - log mu."""
    num = b.logp if num is None else num
    den = b.logp_mu if den is None else den
    return (widen(num) - widen(den).detach()).masked_fill_(~b.mask, 0.0)


def ratio(d: Tensor) -> Tensor:
    """r = exp(d), held at exp(D_MAX) without gradient beyond D_MAX."""
    return d.clamp(max=D_MAX).exp()
