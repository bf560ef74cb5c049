"""What each method would have done to exactly these tokens, by the registry's own functions.

The weight of a token is the derivative of S by its log-prob. Pure importance sampling has r |A| there,
and everything is said against that: cut (weight 0), capped (less), raised (more).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from simlab.core.aggregate import reduce_diagnostics
from simlab.core.tokens import TokenBatch, log_ratio
from simlab.stabilizers import NAMES, Stabilizer, bind

SAME = 1e-6  # relative difference of two weights that is rounding
SHOWN = (
    "ppo",
    "sat",
    "gspo",
    "dppo",
    "kpop",
    "icepop",
    "tis",
    "cispo",
    "m2po",
    "opsm",
    "trm",
    "seqclip",
)
SHARES = (0.01, 0.05, 0.2)  # of the tokens, asked for by `thresholds`
HALVINGS = 15  # of a bisection
RANGE = (1e-8, 1e4)  # of a threshold
MICRO = 8  # responses of a micro-batch, for quantiles of one


class Weights(NamedTuple):
    """What a method does to each token `[n]` of a batch."""

    weight: np.ndarray  # dS / d log pi
    cut: np.ndarray  # bool: an advantage and no gradient
    diagnostics: dict[str, float]


def weights(bound: Stabilizer, b: TokenBatch, diagnostics: bool = True) -> Weights:
    """Weights of a batch that is a whole optimizer batch."""
    leaf = b.logp.detach().clone().requires_grad_()
    moved = replace(b, logp=leaf)
    out = bound.surrogate(moved, **bound.stats([moved]))
    (grad,) = torch.autograd.grad(out.S.sum(), leaf) if out.S.requires_grad else (None,)
    grad = torch.zeros_like(b.logp) if grad is None else grad
    shown = reduce_diagnostics(b, out.diagnostics) if diagnostics else {}
    return Weights(
        grad.numpy().astype(float),
        ((b.advantage != 0) & ~out.active & b.mask).numpy(),
        {name: float(x) for name, x in shown.items()},
    )


def signed(b: TokenBatch, known: bool) -> list[TokenBatch]:
    """The batch itself, or, where advantages are unknown, all tokens at +1 and all at -1."""
    one = torch.ones_like(b.advantage)
    return [b] if known else [replace(b, advantage=one), replace(b, advantage=-one)]


def effect(bound: Stabilizer, b: TokenBatch, known: bool, noise: TokenBatch | None) -> dict:
    """One row of the table; shares are of all sampled tokens unless they say otherwise.

    `known` says that the advantages are the log's own; `noise` is the batch at the rollout's weights, in
    which only the engine differs. Raises ValueError where the method lacks a field.
    """
    parts = signed(b, known)
    of = [weights(bound, part) for part in parts]
    A = np.concatenate([part.advantage.numpy().astype(float) for part in parts])
    d = np.tile(log_ratio(b).numpy().astype(float), len(parts))
    pure = np.exp(np.minimum(d, 70)) * np.abs(A)
    w = np.concatenate([np.abs(x.weight) for x in of])
    cut = np.concatenate([x.cut for x in of])
    acts = A != 0
    capped, raised = acts & ~cut & (w < pure * (1 - SAME)), w > pure * (1 + SAME)
    outward, back = A * d > 0, A * d < 0
    other = [weights(bound, replace(x, advantage=-x.advantage), False).cut for x in parts]
    n = max(len(w), 1)
    total = w.sum()
    top = np.sort(w)[::-1][: max(n // 100, 1)].sum()
    row = {
        "tokens": len(b.logp),
        "cut": float(cut.sum() / n),
        "capped": float(capped.sum() / n),
        "raised": float(raised.sum() / n),
        "out_of_band": float((cut | np.concatenate(other)).sum() / n),
        "cut_outward": _share(cut & outward, outward),
        "cut_pull_back": _share(cut & back, back),
        "weight_kept": float(total / pure.sum()) if pure.sum() else None,
        "top_1_percent": float(top / total) if total else None,
        "largest_weight": float(w.max(initial=0)),
        "acts": bool((cut | capped | raised).any()),
        "diagnostics": {k: float(np.mean([x.diagnostics[k] for x in of])) for k in of[0].diagnostics},
    }  # fmt: skip
    if noise is not None:
        row["cut_by_noise"] = cut_share(bound, noise, known)
    return row


def _share(some: np.ndarray, of: np.ndarray) -> float | None:
    return float(some.sum() / of.sum()) if of.any() else None


def cut_share(bound: Stabilizer, b: TokenBatch, known: bool) -> float:
    """Share of the tokens that have an advantage and get no gradient."""
    return float(np.mean([weights(bound, x, False).cut.mean() for x in signed(b, known)]))


def table(
    b: TokenBatch,
    known: bool,
    noise: TokenBatch | None = None,
    methods: Sequence[tuple[str, str, dict]] | None = None,
) -> list[dict]:
    """A row a method: (label, name, arguments), the registry at its defaults if None."""
    methods = [(name, name, {}) for name in NAMES] if methods is None else methods
    rows = []
    for label, name, arguments in methods:
        try:
            row = effect(bind(name, **arguments), b, known, noise)
        except ValueError as error:  # a field that the log lacks, or an argument without a default
            row = {"not_computable": str(error)}
        rows.append({"method": label} | row)
    return rows


# ---------------------------------------------------------------- the inverse, and overlaps
KNOBS: dict[str, tuple[str, Callable[[float], dict[str, Any]]]] = {
    "ppo": ("eps", lambda x: {"eps_low": min(x, 1.0), "eps_high": x}),
    "gspo": ("eps", lambda x: {"eps_low": min(x, 1.0), "eps_high": x}),
    "dppo": ("delta", lambda x: {"delta_low": x, "delta_high": x}),
    "kpop": ("phi", lambda x: {"phi": x, "eps_low": 1.0, "eps_high": 1e6}),
    "icepop": ("high = 1/low", lambda x: {"low": 1 / (1 + x), "high": 1 + x, "eps_low": 1.0, "eps_high": 1e6}),
    "opsm": ("delta", lambda x: {"delta": x, "eps_low": 1.0, "eps_high": 1e6}),
    "trm": ("delta", lambda x: {"delta": x, "eps_low": 1.0, "eps_high": 1e6}),
}  # fmt: skip


def thresholds(b: TokenBatch, known: bool, shares: Sequence[float] = SHARES) -> list[dict]:
    """The threshold at which a method cuts a share of these tokens, and the share that it then cuts.

    The smallest threshold, to one part in a thousand, that cuts no more than the share; None where even
    the largest of RANGE cuts more. Whole responses move together under a sequence rule.
    """
    rows = []
    for name, (knob, arguments) in KNOBS.items():
        bound = bind(name, **arguments(1.0))  # checks the names; the values below are in range

        def cut(x: float, bound=bound, arguments=arguments) -> float:
            moved = partial(bound.surrogate, **arguments(x))
            return cut_share(replace(bound, surrogate=moved), b, known)

        for share in shares:
            low, high = RANGE
            row = {"method": name, "argument": knob, "share": share}
            if cut(high) > share:
                rows.append(row | {"value": None, "cut": None})
                continue
            for _ in range(HALVINGS):
                middle = float(np.sqrt(low * high))
                low, high = (low, middle) if cut(middle) <= share else (middle, high)
            value = 1 + high if name == "icepop" else high
            rows.append(row | {"value": value, "cut": cut(high)})
    return rows


def overlap(b: TokenBatch, known: bool, names: Sequence[str] = SHOWN) -> list[dict]:
    """For each two methods that cut something: Jaccard index of what they cut, and the rank correlation
    of the weight that they leave to a token."""
    d = log_ratio(b).numpy().astype(float)
    kept = {}
    for name in names:
        parts = [weights(bind(name), x, False) for x in signed(b, known)]
        A = [np.abs(x.advantage.numpy().astype(float)) for x in signed(b, known)]
        pure = [np.exp(np.minimum(d, 70)) * a for a in A]
        left = np.concatenate(
            [np.abs(x.weight) / np.where(p > 0, p, 1) for x, p in zip(parts, pure, strict=True)]
        )
        cut = np.concatenate([x.cut for x in parts])
        if cut.any():
            kept[name] = (cut, ranks(left))
    rows = []
    for i, one in enumerate(kept):
        for other in list(kept)[i + 1 :]:
            (x, rank_x), (y, rank_y) = kept[one], kept[other]
            rows.append({
                "methods": [one, other],
                "jaccard": float((x & y).sum() / (x | y).sum()),
                "rank_correlation": _correlation(rank_x, rank_y),
            })  # fmt: skip
    return rows


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks `[n]`, equal numbers sharing their mean rank."""
    _, number, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[number.reshape(-1)]


def _correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum() / size) if size else None


def local_quantiles(b: TokenBatch) -> dict[str, float] | None:
    """SAT's q of the whole batch, and its 10 % and 90 % quantiles over micro-batches of MICRO responses."""
    bound = bind("sat")
    present = torch.unique(b.response)
    if len(present) < 2 * MICRO:
        return None
    place = torch.searchsorted(present, b.response) // MICRO
    order = torch.argsort(place, stable=True)
    parts: list[Tensor] = list(torch.split(order, torch.bincount(place).tolist()))
    q = np.array([float(bound.stats([b.take(index)])["q"]) for index in parts])
    low, high = np.quantile(q, [0.1, 0.9])
    return {
        "global": float(bound.stats([b])["q"]),
        "local_10": float(low),
        "local_90": float(high),
        "micro_batches": len(q),
    }
