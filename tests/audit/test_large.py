"""Logs of more tokens than one block: the same numbers, in bounded memory."""

import tracemalloc
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from audit.cases import audited, rows_of

import simlab.audit.blocks as in_blocks
from simlab.audit.audit import audit_tokens
from simlab.audit.blocks import active, blocks, per_response
from simlab.token_log import windows
from simlab.token_log.names import ROLES
from simlab.token_log.pairs import read_tokens


def written(path, responses=60, tokens=50):
    """Responses of 0 to `tokens` tokens, some masked, with steps, ages and entropies."""
    rng = np.random.default_rng(0)
    size = rng.integers(0, tokens, responses)
    rollout = [-rng.exponential(1.0, n) for n in size]
    trainer = [x + rng.normal(size=len(x)) * 0.05 for x in rollout]
    more = {
        "loss_mask": [(rng.random(n) < 0.9).astype(int).tolist() for n in size],
        "entropy": [rng.random(n).tolist() for n in size],
        "weight_versions": [rng.integers(0, 3, n).tolist() for n in size],
        "step": [i // 20 for i in range(responses)],
    }
    rows = rows_of(trainer, rollout, trainer_version=3, **more)
    pl.DataFrame(rows).write_parquet(path)
    return path


def close(one, other):
    """Equal numbers, to rounding, wherever they stand."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[x], other[x]) for x in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return other == (pytest.approx(one, rel=1e-9) if isinstance(one, float) else one)


def test_blocks_change_nothing(tmp_path, monkeypatch):
    """One block, or blocks of 100 tokens in windows of a few rows."""
    path = written(tmp_path / "log.parquet")
    whole = audited(path).result
    monkeypatch.setattr(in_blocks, "BLOCK", 100)
    monkeypatch.setattr(windows, "LARGE", 5000)
    assert len(windows.windows(path)) > 3
    again = audited(path).result
    for name in ("counts", "mismatch", "by", "worst_responses", "checked", "findings"):
        assert close(whole[name], again[name]), name


def test_blocks_are_whole_responses(tmp_path, monkeypatch):
    """In order, none cut, none twice."""
    t, _ = read_tokens(str(written(tmp_path / "log.parquet")), more=tuple(ROLES))
    tokens = active(t.mask)
    assert tokens.tolist() == np.flatnonzero(t.mask).tolist()
    monkeypatch.setattr(in_blocks, "BLOCK", 64)
    parts = list(blocks(t, tokens))
    assert np.concatenate(parts).tolist() == tokens.tolist()
    ends = [(t.response(int(x[0])), t.response(int(x[-1]))) for x in parts]
    assert all(last < first for (_, last), (first, _) in pairwise(ends))
    count, total = per_response(t, tokens)
    d = np.abs(t.trainer - t.rollout)[tokens]
    assert count.tolist() == np.bincount(t.responses[tokens], minlength=len(t.row)).tolist()
    assert total == pytest.approx(np.bincount(t.responses[tokens], d, len(t.row)))


def test_D034_bytes_of_a_token():
    """Two million tokens in float32 take the analysis less than 150 bytes each, most of it in blocks."""
    from simlab.token_log.tokens import Tokens

    rng, n = np.random.default_rng(0), 1 << 21
    rollout = -rng.exponential(1.0, n).astype(np.float32)
    trainer = np.minimum(rollout + rng.normal(size=n).astype(np.float32) / 20, 0)
    R = n // 1024
    t = Tokens(trainer, rollout, np.ones(n, bool), np.arange(R + 1) * 1024, (), np.zeros(R, int), np.arange(R), np.zeros((R, 0)), columns=("pi", "mu"))  # fmt: skip
    tracemalloc.start()
    audit = audit_tokens(t, methods=())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert audit.exit == 0
    assert peak < 150 * n
