"""One measurement: a trainer rank and the simulator give one batch the same columns."""

import pytest
import torch

from scaleup.trainer import rank
from simlab.contract.batches import ragged
from simlab.core.columns import MISMATCH
from simlab.study.measure import measure


def test_both_worlds_measure_the_same(monkeypatch):
    """Every shared column, from the whole batch and from three micro-batches of a rank."""
    b = ragged(3, by_token=True)
    active, old = b.logp > b.logp_mu, b.logp_mu + 0.05
    want = {name: x.item() for name, x in measure([b], [active], logp_rollout=[old]).items()}
    index = [torch.arange(i, len(old), 3) for i in range(3)]
    monkeypatch.setattr(rank, "batch_sum", lambda x: x)
    monkeypatch.setattr(rank, "from_last_stage", lambda value: value)
    got = rank.measured(
        [b.take(i) for i in index], [active[i] for i in index], [old[i] for i in index]
    )
    assert got == pytest.approx(want, rel=1e-12)
    assert got.keys() == {*MISMATCH, "active", "cut", "unlike_ppo"}
    assert {type(x) for x in got.values()} == {int, float}
