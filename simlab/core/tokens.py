"""The one record every loss reads, and the log-ratio that starts all of them.

Last axis = tokens, leading axes = independent lanes (configurations, seeds; none on a cluster).
Losses are decided on the log-ratio d and only exponentiate what was selected, so a masked NaN or
infinity never meets a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simlab.core.layouts import Layouts

# exp(d) is held at exp(LOG_RATIO_CAP) = 2.5e30 beyond this log-ratio: far outside any trust region, and a sum
# of 1e8 such tokens is finite in float32. Tokens beyond have no gradient and are counted as `overflow`.
LOG_RATIO_CAP = 70.0
ROUNDING = 1e-3  # nats, by which rounding may put a log-prob above 0

# Fields that only some methods read. Losses treat all of them as constants, except that `topk` may carry
# a gradient (core/head.py).
OPTIONAL = {
    "logp_prox": "the proximal log-prob (trainer before the step)",
    "logp_ref": "the log-prob of the frozen reference policy",
    "entropy_mu": "the entropy of the rollout distribution",
    "entropy_prox": "the entropy of the proximal policy",
    "gini_mu": "the Gini index 1 - sum mu^2 of the rollout distribution",
    "age": "the optimizer steps since the weights that sampled the token",
    "stratum": "the class of the token (turn or position)",
    "uniform": "a uniform draw for each token",
    "tv": "the total variation between mu and pi at the token's state",
    "reward": "the reward of the token's response",
    "group": "the number of the prompt that the token's response answers",
    "position": "the place of the token in its response",
    "topk": "the log-probs of mu's likeliest tokens under pi",
    "topk_mu": "the log-probs of mu's likeliest tokens under mu",
}
LANES = "TokenBatch.logp has shape {}, a batch is one list of tokens [N]: from_padded takes [responses, tokens]; lanes=True makes every leading index a batch with a quantile of its own"
TOP = ("topk", "topk_mu")  # [..., N, K]; everything else is [..., N]
LOG_PROBS = ("logp", "logp_mu", "logp_prox", "logp_ref", *TOP)
KINDS = {
    "mask": torch.bool,
    "response": torch.int64,
    "age": torch.int64,
    "stratum": torch.int64,
    "group": torch.int64,
    "position": torch.int64,
}


@dataclass(frozen=True, eq=False, repr=False)
class TokenBatch(Layouts):
    """Sampled tokens of one optimizer batch, or of one micro-batch of it.

    Every field is `[N]` (the top-k pair `[N, K]`); padded and packed tensors go through `from_padded`
    and `from_packed`. With `lanes=True` every field is `[..., N]`, each lane a batch of its own. `mask` is True on tokens that the policy
    sampled and may learn from; what stands elsewhere is never read. One response of two tokens and a pad:
    `TokenBatch(tensor([-1., -2., 0.]), tensor([-1.1, -2., 0.]), tensor([1., 1., 0.]),
    tensor([True, True, False]), tensor([0, 0, 0]))`.

    Raises ValueError, naming the field, when shapes or dtypes do not fit, or a token of the mask has a negative
    response or age, or a response beyond `n_responses` (`replace` counts anew where it was not given).
    """

    logp: Tensor  # nats, log pi(token) of the policy in training; carries the gradient
    logp_mu: Tensor  # nats, log mu(token), mu = the distribution really drawn from
    advantage: Tensor  # reward units, usually group-normalised
    mask: Tensor  # bool
    response: Tensor  # int64, index of the response a token belongs to; any order
    logp_prox: Tensor | None = None  # nats, log-prob of the proximal policy
    logp_ref: Tensor | None = None  # nats, log-prob of the reference policy of a KL term
    entropy_mu: Tensor | None = None  # nats, entropy of mu at the token's state
    entropy_prox: Tensor | None = None  # nats, entropy of the policy of logp_prox at that state
    gini_mu: Tensor | None = None  # 1 - sum_a mu(a)^2 at the token's state
    age: Tensor | None = None  # int64, optimizer steps since the weights that sampled the token
    stratum: Tensor | None = None  # int64, turn or position class, for conditioned quantiles
    uniform: Tensor | None = None  # in [0, 1), for methods that draw
    reward: Tensor | None = None  # reward units, of the response, the same on each of its tokens
    group: Tensor | None = None  # int64, the prompt, one number in all micro-batches and ranks
    position: Tensor | None = None  # int64, order of the tokens of a response; gaps are allowed
    tv: Tensor | None = None  # (1/2) sum_a |pi - mu| at the token's state; a simulator knows it
    # nats, mu's K likeliest tokens, the likeliest first, under pi (may carry a gradient) and under mu. -inf
    # in both where that is the sampled token itself, which `logp` and `logp_mu` are for; core/head.py
    topk: Tensor | None = None
    topk_mu: Tensor | None = None
    n_responses: int = None  # pyright: ignore[reportAssignmentType] # 1 + the largest response, found if not given
    lanes: bool = False  # whether there are leading axes
    # (response, mask, age) that were looked through, and the n_responses that was found: for `replace`
    _seen: tuple | None = field(default=None, repr=False)

    def __post_init__(self):
        if self.logp.dim() != 1 and not self.lanes:
            raise ValueError(LANES.format(tuple(self.logp.shape)))
        for name, value in self.held().items():
            shape = value.shape[:-1] if name in TOP else value.shape
            if shape != self.logp.shape:
                raise ValueError(
                    f"TokenBatch.{name} has shape {tuple(value.shape)}, "
                    f"logp has {tuple(self.logp.shape)}"
                )
            kind = KINDS.get(name)
            if kind is not None and value.dtype != kind:
                raise ValueError(
                    f"TokenBatch.{name} must be {str(kind).removeprefix('torch.')}, got {value.dtype}"
                )
        mine = (self.response, self.mask, self.age)
        seen, counted = self._seen or ((None,) * 3, None)
        if not self.mask.is_meta and any(x is not y for x, y in zip(mine, seen, strict=True)):
            high = self._look()
            if self.n_responses in (None, counted):
                counted = max(high + 1, counted or 1)
                object.__setattr__(self, "n_responses", counted)
            elif high >= self.n_responses:
                raise ValueError(
                    f"TokenBatch.response is {high} on a token of the mask, n_responses is "
                    f"{self.n_responses}; leave n_responses out, or give 1 + the largest index"
                )
            object.__setattr__(self, "_seen", (mine, counted))

    def _look(self) -> int:
        """The largest response on the mask; on a GPU this waits, once for each tensor looked at.

        Raises ValueError for a negative response or age on the mask.
        """
        low, high = _ends(self.response, self.mask)
        if low < 0:
            raise ValueError(f"TokenBatch.response is {low} on a token of the mask")
        young = 0 if self.age is None else _ends(self.age, self.mask)[0]
        if young < 0:
            raise ValueError(
                f"TokenBatch.age is {young} on a token of the mask; an age counts optimizer steps and "
                "is at least 0: where a version is unknown (-1), take its tokens out of the mask"
            )
        return high

    def __repr__(self) -> str:
        rest = [name for name in self.held() if name in OPTIONAL]
        active = "?" if self.mask.is_meta else int(self.mask.sum())
        size = f"{tuple(self.logp.shape)}, {active} active, {self.n_responses} responses"
        return f"TokenBatch({', '.join([size, str(self.logp.dtype)[6:], *rest])})"

    @property
    def dtype(self) -> torch.dtype:
        """What every loss computes in: float64 if a field is float64, float32 otherwise.

        `on_mask` and `log_ratio` hand out every field in it. Ratios are never formed in half
        precision, and rewards of another library (float64, int) meet float32 log-probs. `uniform`
        has no say: it is compared and never multiplied.
        """
        wide = any(x.dtype == torch.float64 for k, x in self.held().items() if k != "uniform")
        return torch.float64 if wide else torch.float32

    def held(self) -> dict[str, Tensor]:
        """The fields that this batch has, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)[:-3]}
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

    def without(self, tokens: Tensor) -> TokenBatch:
        """The batch with `tokens` `[..., N]` (bool) taken out of the mask; nothing is looked at again."""
        mask = self.mask & ~tokens
        return replace(self, mask=mask, _seen=((self.response, mask, self.age), self.n_responses))

    def screen(self) -> tuple[TokenBatch, dict[str, Tensor]]:
        """Take tokens with an impossible number out of the mask, and count them by field.

        Impossible is what is not finite, and a log-prob above 0 by more than ROUNDING nats; what
        rounding puts above 0 stays, and every loss takes it. A loss assumes finite input on active
        tokens: whoever reads numbers from outside (an engine, a log) screens first and reports the
        counts `[...]`. A token bad in two fields counts twice.
        """
        counts, mask = {}, self.mask
        for name, value in self.held().items():
            if value.is_floating_point():
                bad = ~torch.isfinite(value)
                if name in LOG_PROBS:
                    bad = bad | (value > ROUNDING)
                if name in TOP:  # -inf stands for the sampled token itself
                    bad = (bad & (value != -torch.inf)).any(-1)
                bad = bad & self.mask
                counts[name] = bad.sum(-1)
                mask = mask & ~bad
        return replace(self, mask=mask), counts


def _ends(x: Tensor, mask: Tensor) -> tuple[int, int]:
    """Smallest and largest entry on the mask (0, 0 if it is empty); what it hides is never read."""
    if not x.numel():
        return 0, 0
    ends = x.aminmax()
    if int(ends.min) < 0 or not bool(mask.all()):
        ends = torch.where(mask, x, 0).aminmax()
    return int(ends.min), int(ends.max)


def nothing(*shape: int) -> TokenBatch:
    """A batch `[*shape]` with every field and no active token: NaN everywhere, -1 in integers."""
    x, i = torch.full(shape, torch.nan), torch.full(shape, -1)
    optional: dict[str, Any] = dict.fromkeys(OPTIONAL, x)
    optional |= {
        name: i for name, dtype in KINDS.items() if dtype == torch.int64 and name in OPTIONAL
    }
    optional |= dict.fromkeys(TOP, torch.full((*shape, 2), torch.nan))
    return TokenBatch(x, x, x, torch.zeros(shape, dtype=torch.bool), i, **optional, lanes=True)


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
    # [..., N] bool, tokens whose log-prob, or a column of whose head, receives a gradient from the sum of S
    active: Tensor
    diagnostics: dict[str, Diagnostic]


class _Graded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, S: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return S.view_as(S)

    @staticmethod
    def backward(ctx, g: Tensor):
        first_derivative_only()
        (w,) = ctx.saved_tensors
        return g * w, None, None


def first_derivative_only() -> None:
    """Raises RuntimeError where a graph of the backward pass is asked for."""
    if torch.is_grad_enabled():  # create_graph: a weight would pass for a constant
        raise RuntimeError(
            "a loss in closed form has first derivatives only: leave create_graph out"
        )


def graded(x: Tensor, S: Tensor, w: Tensor) -> Tensor:
    """S `[..., N]` with the closed-form gradient dS/dx = w: formed with the value, in one pass.

    Half of the cost of a loss in eager mode is the chain of temporaries that autograd keeps. Values
    and weights are computed without it, and a test holds w against the derivative of S.
    """
    return _Graded.apply(x, S, w)


def widen(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32; for numbers that belong to no batch."""
    return x if x.dtype == torch.float64 else x.float()


def on_mask(b: TokenBatch, x: Tensor) -> Tensor:
    """x in the working dtype where the mask is True, 0 elsewhere (value and gradient)."""
    return torch.where(b.mask, x.to(b.dtype), 0.0)


def weighted(b: TokenBatch, w: Tensor, diagnostics: dict[str, Diagnostic]) -> Surrogate:
    """S = sg[w] log pi, the policy-gradient form: w `[..., N]` is 0 where masked or dropped."""
    w, x = w.detach(), on_mask(b, b.logp)
    return Surrogate(graded(x, w * x, w), w != 0, diagnostics)


def log_ratio(b: TokenBatch, num: Tensor | None = None, den: Tensor | None = None) -> Tensor:
    """d = log num - sg[log den] in nats `[..., N]`, 0 where masked; by default log pi - log mu. In
    the working dtype."""
    num = b.logp if num is None else num
    den = b.logp_mu if den is None else den
    return (num.to(b.dtype) - den.to(b.dtype).detach()).masked_fill_(~b.mask, 0.0)


def ratio(d: Tensor) -> Tensor:
    """r = exp(d), held at exp(LOG_RATIO_CAP) without gradient beyond LOG_RATIO_CAP."""
    return d.clamp(max=LOG_RATIO_CAP).exp()
