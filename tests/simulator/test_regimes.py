"""The regime map: stretches, the best value without its luck, and a small map by hand."""

import numpy as np
import polars as pl
import pytest

from simlab.simulator.config import Config
from simlab.simulator.regimes import crossed, figures, findings, regimes, stretch

LRS = (1.0, 2.0, 4.0, 8.0)
# finals of four seeds at each learning rate; the bar is at 0.7
FINALS = {
    ("ppo", "1"): [[0.8] * 4, [0.9] * 4, [0.95] * 4, [0.1] * 4],
    ("ppo", "8"): [[0.8] * 4, [0.1, 0.9, 0.9, 0.9], [0.9] * 4, [0.1] * 4],
    ("sat", "1"): [[0.8] * 4, [0.9] * 4, [0.9] * 4, [0.99] * 4],
    ("sat", "8"): [[0.1] * 4] * 4,
}


@pytest.fixture(scope="module")
def config():
    return Config(
        methods=("ppo", "sat"), lags=("1", "8"), seeds=4, draws=1, healthy_lag="1",
        sweep=("training.lr=1,2,4.0,8",),
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    rows = [
        {"arm": arm, "lag": lag, "training.lr": lr, "seed": seed, "final": x, "failed": x < 0.7}
        for (arm, lag), finals in FINALS.items()
        for lr, seeds in zip(LRS, finals, strict=True)
        for seed, x in enumerate(seeds)
    ]
    return pl.DataFrame(rows)


def test_the_map_by_hand(config, runs):
    """Ranges, the reference's best value where it is healthy, and the failures there."""
    table = regimes(config, runs)
    rows = {(r["arm"], r["lag"]): r for r in table.iter_rows(named=True)}
    assert {r["tuned"] for r in rows.values()} == {4.0}
    seen = {k: (r["stable"], r["stable_low"], r["stable_high"]) for k, r in rows.items()}
    assert seen == {
        ("ppo", "1"): (3, 1.0, 4.0),
        ("ppo", "8"): (
            1,
            1.0,
            1.0,
        ),  # one failure of four is more than a tenth; the first of equals
        ("sat", "1"): (4, 1.0, 8.0),
        ("sat", "8"): (0, None, None),
    }
    assert [rows[k]["fail_tuned"] for k in rows] == [0, 0, 0, 1]
    assert rows["ppo", "1"]["best_at"] == 4.0
    assert rows["ppo", "1"]["best"] == pytest.approx(0.95)
    assert rows["ppo", "8"]["stable_count_low"] == 1
    assert rows["ppo", "8"]["stable_count_high"] == 3  # resamples without the failed seed
    summary = runs.unique(["arm", "lag", "training.lr"], maintain_order=True).with_columns(
        still=pl.when(arm="sat", lag="8").then(1.0).otherwise(0.0), empty=0.0, flat_groups=1.0,
        seeds_alike=False,
    )  # fmt: skip
    said = findings(config, table, summary)
    assert said[0].startswith(
        "Nothing was trained in sat at lag 8, training.lr 1.0, sat at lag 8, "
    )
    assert (
        said[1]
        == "Lag 1, stable training.lr: ppo 1 to 4 (or below); sat 1 to 8 (or below and above)."
    )
    assert said[2] == "Lag 8, stable training.lr: ppo 1 to 1 (or below); sat nowhere."
    assert findings(config, table, summary.with_columns(still=0.0)) == said[1:]


def test_the_figures(config, runs):
    """Each draws, and has its guide."""
    table = regimes(config, runs)
    assert all(draw(config, runs, table).axes and guide for _, draw, guide in figures(config))


@pytest.mark.parametrize(
    ("stable", "said"),
    [
        ("", (0, 0)),
        ("0", (0, 0)),
        ("1", (0, 1)),
        ("0110", (1, 2)),
        ("1011", (2, 2)),
        ("11011", (0, 2)),
    ],
)
def test_stretch(stable, said):
    assert stretch(np.array([x == "1" for x in stable], bool)) == said


def test_the_best_of_many_equals_is_not_better():
    """Of 16 values that differ by chance alone, the largest mean is biased and the crossed one is not."""
    rng = np.random.default_rng(0)
    finals = rng.normal(0.5, 0.1, (400, 12, 16))  # repeats, seeds, values
    largest = finals.mean(1).max(-1)
    best = np.array([crossed(x).mean() for x in finals])
    assert largest.mean() > 0.54
    assert abs(best.mean() - 0.5) < 0.01
