"""How far apart the two columns are by age, position, step and the like, in blocks of whole responses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simlab.audit.batch import of_responses
from simlab.audit.blocks import blocks, per_response
from simlab.token_log.tokens import Tokens

MOST_BINS = 64  # rows of a breakdown
MOST_EDGES = 1 << 20  # tokens that quantile bins are taken from
UNKNOWN = 0  # label of NaN


class Bins(NamedTuple):
    """How a key becomes a label: whole numbers each, edges of quantiles, or powers of two."""

    kind: str  # values, edges, doubling
    edges: np.ndarray

    @property
    def number(self) -> int:
        """Labels there are, that of NaN included."""
        return {"values": len(self.edges) + 1, "edges": max(len(self.edges), 2), "doubling": 66}[
            self.kind
        ]

    def labels(self, key: np.ndarray) -> np.ndarray:
        """From 1 on `[n]`, UNKNOWN for NaN."""
        known = np.isfinite(key)
        if self.kind == "doubling":  # 0, 1, 2-3, 4-7, ...
            return np.frexp(key)[1].astype(np.int64) + 1
        if self.kind == "values":
            label = np.searchsorted(self.edges, key) + 1
        else:
            last = max(len(self.edges) - 2, 0)
            label = np.clip(np.searchsorted(self.edges, key, side="right") - 1, 0, last) + 1
        return np.where(known, label, UNKNOWN)


def breakdowns(t: Tokens, tokens: np.ndarray) -> dict[str, list[dict]]:
    """Rows {from, to, tokens, d_bar, d_se, d_mean, k3, d_max, share} for each thing the log can be cut by.

    `share` is that of the whole sum of |d|. Small whole numbers have a row each, others quantile bins.
    """
    turn = _turn(t) if not t.mask.all() else None
    keys = {
        "age": None if t.version is None or t.trained is None else lambda x: _age(t, x),
        "position": lambda x: (x - t.starts[t.responses[x]]).astype(float),
        "step": _of(t, "step", True),
        "entropy": _of(t, "entropy", False),
        "log_prob": lambda x: t.rollout[x].astype(float),
        "reward": _of(t, "reward", True),
        "turn": None if turn is None else lambda x: turn[x].astype(float),
        "file": (lambda x: t.file[t.responses[x]].astype(float)) if len(t.files) > 1 else None,
    }
    if not len(tokens):
        return {}
    some = of_responses(t, tokens, MOST_EDGES)
    sums = {
        name: Sums(key, _bins(t, tokens, some, name, key))
        for name, key in keys.items()
        if key is not None
    }
    for block in blocks(t, tokens):
        d = t.trainer[block].astype(float) - t.rollout[block]
        k3 = np.expm1(np.minimum(d, 70)) - d
        for x in sums.values():
            x.add(block, t.responses[block], d, k3)
    out = {name: rows_of(x) for name, x in sums.items()}
    return {name: rows for name, rows in out.items() if len(rows) > 1}


def _bins(t: Tokens, tokens: np.ndarray, some: np.ndarray, name: str, key) -> Bins:
    if name == "position":
        return Bins("doubling", np.zeros(0))
    if name in ("step", "reward", "file"):
        x = t.file if name == "file" else t.extra[name]
        values = np.unique(x.astype(float))
    else:
        values = np.zeros(0)
        for block in blocks(t, tokens):
            values = np.union1d(values, own := np.unique(key(block)))
            if len(values) > MOST_BINS + 1 or not np.array_equal(
                own, np.round(own), equal_nan=True
            ):
                values = np.append(values, 0.5)  # no whole numbers, or too many
                break
    values = values[np.isfinite(values)]
    if len(values) <= MOST_BINS and np.array_equal(values, np.round(values)):
        return Bins("values", values)
    x = key(some)
    return Bins("edges", np.unique(np.quantile(x[np.isfinite(x)], np.linspace(0, 1, 11))))


class Sums:
    """What is added up of each label of a key."""

    def __init__(self, key, bins: Bins):
        self.key, self.bins, n = key, bins, bins.number
        self.total = np.zeros(
            (8, n)
        )  # count, |d|, d, k3, d^2, and over responses: sums^2, sums x count, count^2
        self.responses = np.zeros(n, dtype=np.int64)
        self.low, self.high, self.largest = (np.full(n, x) for x in (np.inf, -np.inf, 0.0))

    def add(self, block: np.ndarray, r: np.ndarray, d: np.ndarray, k3: np.ndarray) -> None:
        """A block of whole responses."""
        value, n = self.key(block), self.bins.number
        label, size = self.bins.labels(value), np.abs(d)
        R = int(r[-1]) - int(r[0]) + 1
        cell = (r - r[0]).astype(np.int64) * n + label
        count = np.bincount(cell, minlength=R * n).reshape(R, n)
        sums = np.bincount(cell, size, R * n).reshape(R, n)
        self.total += (
            count.sum(0), sums.sum(0), np.bincount(label, d, n), np.bincount(label, k3, n), np.bincount(label, d**2, n),
            (sums**2).sum(0), (sums * count).sum(0), (count.astype(float) ** 2).sum(0),
        )  # fmt: skip
        self.responses += (count > 0).sum(0)
        np.fmin.at(self.low, label, value)
        np.fmax.at(self.high, label, value)
        np.maximum.at(self.largest, label, size)


def rows_of(x: Sums) -> list[dict]:
    """One row for each label that occurs; NaN is a row of its own."""
    bins, low, high, largest, total = x.bins, x.low, x.high, x.largest, x.total
    some = np.flatnonzero(total[0])
    count, sums, signed, k3, square, ss, sc, cc = total[:, some]
    mean, R = sums / count, x.responses[some]
    variance = np.maximum(square - count * mean**2, 0)
    clustered = np.maximum(ss - 2 * mean * sc + mean**2 * cc, 0) * R / np.maximum(R - 1, 1)
    error = np.sqrt(np.where(R > 1, np.maximum(variance, clustered), variance)) / count
    whole = sums.sum()
    return [
        {
            "from": None if j == UNKNOWN and bins.kind != "doubling" else float(low[j]),
            "to": None if j == UNKNOWN and bins.kind != "doubling" else float(high[j]),
            "tokens": int(count[i]),
            "d_bar": float(mean[i]),
            "d_se": float(error[i]),
            "d_mean": float(signed[i] / count[i]),
            "k3": float(k3[i] / count[i]),
            "d_max": float(largest[j]),
            "share": float(sums[i] / whole) if whole else 0.0,
        }
        for i, j in enumerate(some)
    ]


def worst_responses(t: Tokens, tokens: np.ndarray, most: int = 10) -> list[dict]:
    """The responses with the largest mean |d|, and where each stands in the log."""
    count, total = per_response(t, tokens)
    mean = total / np.maximum(count, 1)
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


def _of(t: Tokens, role: str, per_response: bool):
    """The key of a further column, None if the log has none."""
    x = t.extra.get(role)
    if x is None:
        return None
    return lambda index: x[t.responses[index] if per_response else index].astype(float)


def _age(t: Tokens, tokens: np.ndarray) -> np.ndarray:
    if t.version is None or t.trained is None:
        return np.full(len(tokens), np.nan)
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
