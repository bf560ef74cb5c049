"""Noise resampled from a user's own log of trainer and rollout log-prob pairs.

The log gives, per sampled token, log p (trainer) and log m (engine) at equal weights. Its noise is
kept as log-odds gaps e = logit p - logit m, which for noise on logits do not depend on p, in bins of
log p, so that a dependence which is there survives. Every logit of the engine then moves by an e
drawn from its bin, times 1/sqrt(1 + sum_{b != a} (p_b / (1 - p_a))^2), because the log-odds of a also
moves with the logits of the others. Spread and tails of e, by p, are those of the log.

Accepted files: .parquet or .jsonl, one row per response, list columns `rollout_logprobs`,
`trainer_logprobs`, `loss_mask` (optional, else all tokens). `trainer_logprobs_before`, the scores at
the rollout's weights, is preferred to `trainer_logprobs`; without it the file must not say that the
trainer is at another version, because policy lag would then be replayed as noise.

Measured on a 135M-parameter model (SGLang bf16 against fp32): sd of e is .062 to .07 from p = .01 to
.7 and .09 above .9, where |d| itself falls twentyfold. That is iid logit noise, and why e is used.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from simlab.draws import Draws

BINS, CEILING = 20, -1e-6  # bins of log p; a log-prob of 0 is read as this many nats


def read_pairs(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Trainer and rollout log-probs of all unmasked tokens, nats, flat.

    Raises ValueError in one sentence naming file, column and row.
    """
    file = Path(path)
    rows = _read_rows(file)
    before = "trainer_logprobs_before"
    score = (
        before if rows and isinstance(rows[0], dict) and before in rows[0] else "trainer_logprobs"
    )
    pairs = [_read_row(f"{file}: row {i}", row, score) for i, row in enumerate(rows)]
    trainer, rollout = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0))
    if len(trainer) < BINS:
        raise ValueError(f"{file}: {len(trainer)} unmasked tokens, at least {BINS} are needed")
    d = trainer - rollout
    if abs(d.mean()) > d.std() / 2:
        raise ValueError(
            f"{file}: the mean gap {d.mean():.3f} nats is not small against its spread {d.std():.3f}; "
            "that is a temperature, truncation or position mismatch, not noise that can be replayed"
        )
    return trainer, rollout


def _read_rows(file: Path) -> list[dict]:
    try:
        if file.suffix == ".parquet":
            return pl.read_parquet(file).to_dicts()
        if file.suffix == ".jsonl":
            lines = file.read_text(encoding="utf-8").split("\n")  # a text may hold other line ends
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{file}: cannot be read ({first})") from error
    raise ValueError(f"{file}: a log must be a .parquet or a .jsonl file")


def _read_row(where: str, row: dict, score: str) -> np.ndarray:
    """[trainer, rollout] of the unmasked tokens of one response."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object with columns")
    columns = {name: _numbers(where, row, name) for name in (score, "rollout_logprobs")}
    if row.get("loss_mask") is not None:
        columns["loss_mask"] = _numbers(where, row, "loss_mask")
    if score == "trainer_logprobs" and row.get("weight_versions") is not None:
        columns["weight_versions"] = _numbers(where, row, "weight_versions")
    lengths = [len(x) for x in columns.values()]
    if len(set(lengths)) > 1:
        sizes = ", ".join(f"{n} {name}" for n, name in zip(lengths, columns, strict=True))
        raise ValueError(f"{where} has {sizes} entries")
    mask = columns.pop("loss_mask", np.ones(lengths[0]))
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{where}: loss_mask must hold 0 and 1 only")
    active = mask > 0
    versions, scored = columns.pop("weight_versions", None), row.get("trainer_version")
    if versions is not None and scored is not None:
        other = active & (versions != scored)
        if other.any():
            raise ValueError(
                f"{where} was sampled at version {versions[other][0]:.0f} and scored at version "
                f"{scored}; that gap holds policy lag, so trainer_logprobs_before (scores at the "
                "rollout's weights) is needed"
            )
    for name, x in columns.items():
        bad = active & (~np.isfinite(x) | (x > 0))
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(f"{where}, {name}[{at}] is {x[at]}, not a log-prob")
    return np.stack(list(columns.values()))[:, active]


def _numbers(where: str, row: dict, name: str) -> np.ndarray:
    """A list column of a row as floats; a null entry is NaN."""
    if name not in row:
        raise ValueError(f"{where}: column {name} is missing; it has {', '.join(row)}")
    value = row[name]
    if not isinstance(value, list):
        raise ValueError(f"{where}: {name} is {value!r}, not a list")
    odd = [x for x in value if not (x is None or isinstance(x, (int, float)))]
    if odd:
        raise ValueError(f"{where}: {name} holds {odd[0]!r}, not a number")
    return np.array([np.nan if x is None else x for x in value], dtype=float)


def logit(logp: np.ndarray) -> np.ndarray:
    """log-odds from log-probs, finite at probability 1."""
    held = np.minimum(logp, CEILING)
    return held - np.log(-np.expm1(held))


@lru_cache(maxsize=4)
def gaps(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Inner bin edges in log p `[BINS - 1]` and sorted-by-bin gaps e `[BINS, n]` (equal counts)."""
    trainer, rollout = read_pairs(path)
    order = np.argsort(trainer, kind="stable")
    e = (logit(trainer) - logit(rollout))[order]
    n = len(e) // BINS
    rows = np.stack([e[i * len(e) // BINS :][:n] for i in range(BINS)])
    edges = trainer[order][[i * len(e) // BINS for i in range(1, BINS)]]
    return edges, rows


def logits(z: Tensor, draws: Draws, *, path: str = "") -> Tensor:
    """z `[L, P, T, M, V]` moved by resampled log-odds gaps of the log at `path`, which is required."""
    if not path:
        raise ValueError("replay: path of a .parquet or .jsonl log is needed")
    edges, rows = gaps(path)
    p = torch.softmax(z.double(), -1)
    bins = torch.searchsorted(torch.from_numpy(edges), p.log(), right=True)
    pick = draws.each(lambda rng: rng.integers(rows.shape[1], size=z.shape[1:]))
    e = torch.from_numpy(rows)[bins, pick]
    others = (p.pow(2).sum(-1, keepdim=True) - p.pow(2)) / (1 - p).clamp(min=1e-9).pow(2)
    return z - (e / (1 + others).sqrt()).to(z.dtype)
