"""A real log, clean, and with one fault at a time: the fault is the first finding."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from audit.cases import check, first

from simlab.audit.audit import audit_tokens
from simlab.token_log.columns import flat_columns
from simlab.token_log.names import ROLES, Names

REAL = Path(__file__).parents[1] / "data" / "smollm2_lag8.parquet"
LOG = pl.read_parquet(REAL)


def fresh():
    """The same responses scored by the weights that sampled them: implementation mismatch alone."""
    before = LOG["trainer_logprobs_before"].alias("trainer_logprobs")
    return LOG.with_columns(before, trainer_version=pl.lit(0)).drop("trainer_logprobs_before")


def lists(frame, name, change):
    """The frame with the lists of a column changed, array by array, by `change(row)`."""
    rows = [change(row) for row in frame.iter_rows(named=True)]
    return frame.with_columns(pl.Series(name, rows, dtype=pl.List(pl.Float64)))


def audit(frame):
    tokens, findings = flat_columns(REAL, frame, Names(), tuple(ROLES))
    return audit_tokens(tokens, findings, "log", ())


def rest(row):
    """Probability p of the token, and the number of equally likely others that gives the entropy."""
    p = np.clip(np.exp(row["trainer_logprobs"]), 1e-6, 1 - 1e-6)
    others = (np.array(row["entropy"]) + p * np.log(p) + (1 - p) * np.log(1 - p)) / (1 - p)
    return p, np.exp(np.clip(others, 0, 10))


def tempered(row, T=0.7):
    p, others = rest(row)
    own, each = p ** (1 / T), ((1 - p) / others) ** (1 / T)
    return np.log(own / (own + others * each)).tolist()


def nucleus(row, keep=0.9):
    """Renormalised to the kept mass, which is at least `keep`."""
    return [min(x - np.log(keep), 0.0) for x in row["rollout_logprobs"]]


def bf16(row):
    bits = np.array(row["rollout_logprobs"], dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).tolist()


def shifted(row):
    return [*row["trainer_logprobs"][1:], -1.0] if row["trainer_logprobs"] else []


def zero_filled(row):
    return [0.0 if i % 20 == 19 else x for i, x in enumerate(row["rollout_logprobs"])]


BROKEN = {
    "shifted": (("unusable", "shift"), lambda x: lists(x, "trainer_logprobs", shifted)),
    "T = 0.7": (("unusable", "temperature"), lambda x: lists(x, "trainer_logprobs", tempered)),
    "top-p 0.9": (("unusable", "truncation"), lambda x: lists(x, "rollout_logprobs", nucleus)),
    "bf16 grid": (("alarm", "grid"), lambda x: lists(x, "rollout_logprobs", bf16)),
    "zero-filled": (
        ("set aside", "placeholder"),
        lambda x: lists(x, "rollout_logprobs", zero_filled),
    ),
}


@pytest.mark.parametrize("log", [fresh, lambda: LOG], ids=["lag 0", "lag 8"])
def test_the_real_logs_are_clean(log):
    """No alarm at lag 0 or 8; numbers of the README beside the data; parts of the split."""
    result = audit(log())
    numbers = result.result["mismatch"]
    assert result.exit == 0
    if "d_engine" in numbers:
        assert (numbers["d_bar"], numbers["d_engine"]) == pytest.approx((0.0442, 0.0342), abs=5e-5)
        assert numbers["d_policy"] == pytest.approx(0.0236, abs=5e-5)
    else:
        assert numbers["d_bar"] == pytest.approx(0.0342, abs=5e-5)


@pytest.mark.parametrize("log", ["lag 0", "lag 8"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_the_first_finding(name, log):
    """Whatever else it causes comes behind it."""
    frame = (
        fresh()
        if log == "lag 0"
        else LOG.drop("trainer_logprobs_before", "weight_versions", "trainer_version")
    )
    (status, metric), fault = BROKEN[name]
    result = audit(fault(frame))
    status = "set aside" if metric == "shift" else status
    assert first(result) == (status, metric)
    assert result.exit == {"unusable": 2, "alarm": 1, "set aside": 3}[status]


def test_an_engine_that_never_got_the_weights():
    """The log claims the trainer's version; the trainer prefers what was rewarded."""
    claimed = LOG["trainer_version"].repeat_by(LOG["token_ids"].list.len()).alias("weight_versions")
    result = audit(LOG.with_columns(claimed).drop("trainer_logprobs_before"))
    assert first(result) == ("alarm", "stale_engine")
    assert check(result, "stale_engine").value == pytest.approx(4.32, abs=0.01)
    assert result.exit == 1
