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
"""

from __future__ import annotations

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
    reader = {".parquet": pl.read_parquet, ".jsonl": pl.read_ndjson}.get(file.suffix)
    if reader is None:
        raise ValueError(f"{file}: a log must be a .parquet or a .jsonl file")
    try:
        table = reader(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{file}: cannot be read ({first})") from error
    before = "trainer_logprobs_before"
    score = before if before in table.columns else "trainer_logprobs"
    for column in (score, "rollout_logprobs"):
        if column not in table.columns:
            raise ValueError(
                f"{file}: column {column} is missing; it has {', '.join(table.columns)}"
            )
    _refuse_lag(file, table, score)
    pairs = []
    for row, record in enumerate(table.iter_rows(named=True)):
        columns = [record[score], record["rollout_logprobs"]]
        columns.append(record.get("loss_mask") or [1] * len(columns[0] or []))
        if len({len(c) if isinstance(c, list) else -1 for c in columns}) != 1:
            sizes = [len(c) if isinstance(c, list) else "none" for c in columns]
            raise ValueError(
                f"{file}: row {row} has {sizes[0]} {score}, {sizes[1]} rollout_logprobs and "
                f"{sizes[2]} loss_mask entries"
            )
        p, m, mask = (np.array(c, dtype=np.float64) for c in columns)
        for name, x in ((score, p), ("rollout_logprobs", m)):
            bad = (mask > 0) & (~np.isfinite(x) | (x > 0))
            if bad.any():
                at = int(bad.argmax())
                raise ValueError(f"{file}: row {row}, {name}[{at}] is {x[at]}, not a log-prob")
        pairs.append((p[mask > 0], m[mask > 0]))
    trainer, rollout = (
        np.concatenate(x) if pairs else np.zeros(0) for x in zip(*pairs, strict=True)
    )
    if len(trainer) < BINS:
        raise ValueError(f"{file}: {len(trainer)} unmasked tokens, at least {BINS} are needed")
    return trainer, rollout


def _refuse_lag(file: Path, table: pl.DataFrame, score: str) -> None:
    """Raises ValueError when the scores were taken at other weights than the rollout's."""
    if score == "trainer_logprobs" and {"trainer_version", "weight_versions"} <= set(table.columns):
        sampled = table["weight_versions"].list.max()
        stale = (sampled != table["trainer_version"]).arg_true()
        if len(stale):
            row = int(stale[0])
            raise ValueError(
                f"{file}: row {row} was sampled at version {sampled[row]} and scored at version "
                f"{table['trainer_version'][row]}; that gap holds policy lag, so the column "
                "trainer_logprobs_before (scores at the rollout's weights) is needed"
            )


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


def logits(z: Tensor, draws: Draws, *, path: str) -> Tensor:
    """z `[L, P, T, M, V]` moved by resampled log-odds gaps of the log at `path`."""
    edges, rows = gaps(path)
    p = torch.softmax(z.double(), -1)
    bins = torch.searchsorted(torch.from_numpy(edges), p.log(), right=True)
    pick = draws.each(lambda rng: rng.integers(rows.shape[1], size=z.shape[1:]))
    e = torch.from_numpy(rows)[bins, pick]
    others = (p.pow(2).sum(-1, keepdim=True) - p.pow(2)) / (1 - p).clamp(min=1e-9).pow(2)
    return z - (e / (1 + others).sqrt()).to(z.dtype)
