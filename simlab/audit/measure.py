"""How far apart the two columns are: of the whole log, and by age, position, step and the like."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from simlab.audit.batch import at_rollout
from simlab.core.columns import MISMATCH, Column
from simlab.core.mismatch import mismatch
from simlab.core.tokens import TokenBatch
from simlab.token_log.tokens import Tokens

BAND = 0.1  # |r - 1| beyond which a token is counted as outside
FAR = 1.0  # nats
MOST_BINS = 64  # rows of a breakdown
NUMBERS = MISMATCH | {
    "d_se": Column("nats", "standard error of d_bar over responses"),
    "r_mean": Column("", "mean of r, 1 for any noise when tokens were drawn from mu", "verl `rollout_is_mean`, SkyRL `is_ratio_mean`"),
    "mult_prob_error": Column("", "mean of e^\\|d\\|", "NeMo-RL `token_mult_prob_error` (alarm above 1.05)"),
    "probs_diff": Column("", "mean of \\|pi - mu\\|", "verl `training/rollout_probs_diff_mean`"),
    "outside": Column("fraction", f"tokens with r outside of 1 -+ {BAND}"),
    "far": Column("fraction", f"tokens with \\|d\\| above {FAR:g} nat"),
}  # fmt: skip


def numbers(b: TokenBatch, t: Tokens, tokens: np.ndarray) -> dict[str, float]:
    """Every number of NUMBERS that this log has, of a batch of its tokens `[n]`."""
    before = at_rollout(b, t, tokens)
    given = None if before is None else [before.logp]
    out = {name: _plain(x) for name, x in mismatch([b], logp_rollout=given).items()}
    pi, mu = (x.numpy().astype(float) for x in (b.logp, b.logp_mu))
    d = pi - mu
    if not len(d):
        return {"tokens": 0}
    r = np.exp(np.minimum(d, 70))
    out["d_se"] = standard_error(np.abs(d), b.response.numpy())
    out["r_mean"] = float(r.mean())
    out["mult_prob_error"] = float(np.exp(np.minimum(np.abs(d), 70)).mean())
    out["probs_diff"] = float(np.abs(np.exp(pi) - np.exp(mu)).mean())
    out["outside"] = float((np.abs(r - 1) > BAND).mean())
    out["far"] = float((np.abs(d) > FAR).mean())
    return {name: out[name] for name in NUMBERS if name in out}


def _plain(x: Tensor) -> float | int:
    value = x.item()
    return int(value) if not x.is_floating_point() else float(value)


def standard_error(x: np.ndarray, response: np.ndarray) -> float:
    """Of a mean, by token or by response, whichever is larger."""
    z = x - x.mean()
    sums = np.bincount(response, z)
    sums = sums[np.bincount(response) > 0]
    variance = float((z**2).sum())
    if len(sums) > 1:
        variance = max(variance, float((sums**2).sum()) * len(sums) / (len(sums) - 1))
    return float(np.sqrt(variance)) / max(len(x), 1)


# ---------------------------------------------------------------- by something
def breakdowns(t: Tokens, tokens: np.ndarray) -> dict[str, list[dict]]:
    """Rows {from, to, tokens, d_bar, d_se, d_mean, k3, d_max, share} for each thing the log can be cut by.

    `share` is that of the whole sum of |d|. Small whole numbers have a row each, others quantile bins.
    """
    response = t.responses[tokens]
    keys: dict[str, Callable[[], np.ndarray | None]] = {
        "age": lambda: _age(t, tokens),
        "position": lambda: (tokens - t.starts[response]).astype(float),
        "step": lambda: _of(t, "step", response),
        "entropy": lambda: _of(t, "entropy", tokens),
        "log_prob": lambda: t.rollout[tokens].astype(float),
        "reward": lambda: _of(t, "reward", response),
        "turn": lambda: _turn(t)[tokens].astype(float),
        "file": lambda: t.file[response].astype(float) if len(t.files) > 1 else None,
    }
    d = t.trainer[tokens].astype(float) - t.rollout[tokens]
    out = {}
    for name, key in keys.items():
        value = key()
        if value is None or not len(value):
            continue
        rows = by(value, d, response, doubling=name == "position")
        if len(rows) > 1:
            out[name] = rows
    return out


def by(key: np.ndarray, d: np.ndarray, response: np.ndarray, doubling: bool = False) -> list[dict]:
    """One row for each value of `key` `[n]`, or for each bin if there are many; NaN is a row of its own."""
    known = np.isfinite(key)
    values = np.unique(key[known])
    if doubling:  # 0, 1, 2-3, 4-7, ...
        edges = np.concatenate([[0], 2.0 ** np.arange(0, 40)])
        label = np.searchsorted(edges, key, side="right") - 1
    elif len(values) <= MOST_BINS and np.array_equal(values, np.round(values)):
        label = np.searchsorted(values, key)
    else:
        edges = np.unique(np.quantile(key[known], np.linspace(0, 1, 11)))
        label = np.clip(np.searchsorted(edges, key, side="right") - 1, 0, max(len(edges) - 2, 0))
    label = np.where(known, label, -1)
    label = label.astype(np.int64) + 1  # unknown is 0
    bins = np.flatnonzero(np.bincount(label)) - 1
    place = np.zeros(int(bins[-1]) + 2, dtype=np.int64)
    place[bins + 1] = np.arange(len(bins))
    label, n, key = place[label], len(bins), np.where(known, key, 0)
    size, count = np.abs(d), np.bincount(label, minlength=n)
    low, high, largest = (np.full(n, x) for x in (np.inf, -np.inf, 0.0))
    np.minimum.at(low, label, key)
    np.maximum.at(high, label, key)
    np.maximum.at(largest, label, size)
    total = np.bincount(label, size, n)
    signed = np.bincount(label, d, n)
    k3 = np.bincount(label, np.expm1(np.minimum(d, 70)) - d, n)
    return [
        {
            "from": None if bins[i] < 0 else float(low[i]),
            "to": None if bins[i] < 0 else float(high[i]),
            "tokens": int(count[i]),
            "d_bar": float(total[i] / count[i]),
            "d_se": error,
            "d_mean": float(signed[i] / count[i]),
            "k3": float(k3[i] / count[i]),
            "d_max": float(largest[i]),
            "share": float(total[i] / total.sum()) if total.sum() else 0.0,
        }
        for i, error in enumerate(_errors(size, label, response, total / count, count))
    ]


def _errors(size, label, response, mean, count: np.ndarray) -> list[float]:
    """`standard_error` of the tokens of each bin."""
    n = len(mean)
    z = size - mean[label]
    square = np.bincount(label, z**2, n)
    R = int(response.max(initial=0)) + 1
    cell = response.astype(np.int64) * n + label
    sums = np.bincount(cell, z, R * n).reshape(R, n)
    responses = (np.bincount(cell, minlength=R * n).reshape(R, n) > 0).sum(0)
    clustered = (sums**2).sum(0) * responses / np.maximum(responses - 1, 1)
    variance = np.where(responses > 1, np.maximum(square, clustered), square)
    return (np.sqrt(variance) / count).tolist()


def worst_responses(t: Tokens, tokens: np.ndarray, most: int = 10) -> list[dict]:
    """The responses with the largest mean |d|, and where each stands in the log."""
    response = t.responses[tokens]
    size = np.abs(t.trainer[tokens].astype(float) - t.rollout[tokens])
    count = np.bincount(response, minlength=len(t.row))
    mean = np.bincount(response, size, len(t.row)) / np.maximum(count, 1)
    return [
        {
            "response": int(r),
            "place": t.place(int(t.starts[r])),
            "tokens": int(count[r]),
            "d_bar": float(mean[r]),
        }
        for r in np.argsort(-mean, kind="stable")[:most]
        if count[r]
    ]


def _of(t: Tokens, role: str, index: np.ndarray) -> np.ndarray | None:
    x = t.extra.get(role)
    return None if x is None else x[index].astype(float)


def _age(t: Tokens, tokens: np.ndarray) -> np.ndarray | None:
    if t.version is None or t.trained is None:
        return None
    age = (t.trained[tokens] - t.version[tokens]).astype(float)
    return np.where((t.version[tokens] < 0) | (age < 0), np.nan, age)


def _turn(t: Tokens) -> np.ndarray:
    """Which run of sampled tokens of its response a token stands in, from 0 on `[N]`."""
    begins = t.mask & ~np.concatenate([[False], t.mask[:-1]])
    first = t.starts[:-1][np.diff(t.starts) > 0]
    begins[first] = t.mask[first]
    count = np.cumsum(begins)
    before = np.concatenate([[0], count])[t.starts[:-1]]
    return np.maximum(count - before[t.responses] - 1, 0)
