"""A sweep is the same comparisons at every point: same cells, same numbers, one table."""

import polars as pl
import pytest
from simulator.test_compare import ARMS, TINY

import simlab.simulator.compare
from simlab.__main__ import main
from simlab.commands import parse_compare
from simlab.simulator.report import write_report
from simlab.simulator.sweep import axes


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr(simlab.simulator.compare, "write_report", lambda *_: None)


def run(out, *words):
    main(["compare", *TINY, *ARMS, "--out", str(out), "--workers", "1", *words])
    return pl.read_parquet(out / "results.parquet")


@pytest.mark.slow
def test_a_point_is_the_run_of_its_settings(tmp_path):
    """Rows of a point equal those of a run with that setting, cell by cell; both axes are columns."""
    rows = run(
        tmp_path / "map",
        "--sweep",
        "training.lr=1,0.5",
        "gaussian.scale=0.01,0.02",
        "--noise",
        "gaussian",
    )
    here = rows.filter(pl.col("training.lr") == 0.5, pl.col("gaussian.scale") == 0.02)
    alone = run(tmp_path / "one", "--lr", "0.5", "--noise", "gaussian:scale=0.02")
    assert here.drop("training.lr", "gaussian.scale", "experiment", "config").equals(
        alone.drop("experiment", "config")
    )
    table = pl.read_csv(tmp_path / "map" / "summary.csv")
    assert len(table) == 4 * 2 * 3  # points, lags, arms
    assert table.select("arm", "lag", "training.lr", "gaussian.scale").is_unique().all()


def test_a_cell_that_points_share_is_run_once(tmp_path):
    """An argument of one arm leaves the others' cells alone, and each stands at every point."""
    rows = run(tmp_path / "map", "--sweep", "sat.alpha=0.5,0.9")
    assert len(list((tmp_path / "map" / "cells").iterdir())) == 2 * 2 + 2 * 2
    ppo = rows.filter(pl.col("arm") == "ppo")
    one, two = (ppo.filter(pl.col("sat.alpha") == x).drop("sat.alpha") for x in (0.5, 0.9))
    assert one.equals(two)
    sat = rows.filter(pl.col("arm") == "sat")
    assert sat["config"].n_unique() == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["training.lr"], "is not name=value,value"),
        (["lr=1,2"], "is not name=value,value"),
        (["training.lr=1,,2"], "is not name=value,value"),
        (["training.lr=1,x"], "all numbers or all words"),
        (["training.lr=1,1.0"], "a value is given twice"),
        (["training.lr=1,2", "training.lr=3"], "an axis is given twice"),
        (["training.lr=1", "training.steps=5", "world.answers=4"], "two axes at most"),
        (["training.rl=1,2"], "no such setting; there are steps, lr"),
        (["mine.lr=1,2"], "'mine' is no section"),
        (["training.lr=1,-2"], "lr"),
        (["sat.alpha=0.5,2"], "alpha"),
        (["sat.alfa=0.5"], "alfa"),
        (["world.vocab=4.5,8"], "valid integer"),
    ],
)
def test_what_cannot_be_swept_is_one_sentence(words, says, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--sweep", *words])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_sweep_takes_no_token_log(tmp_path, capsys):
    """Two points would write one log."""
    with pytest.raises(SystemExit):
        run(tmp_path / "map", "--sweep", "training.lr=1,2", "--token-log", str(tmp_path / "log"))
    assert "--token-log takes one point" in capsys.readouterr().err


def test_numbers_of_an_axis_are_of_one_kind():
    assert axes(("training.lr=1,0.5",)) == {"training.lr": (1.0, 0.5)}
    assert axes(("training.optimizer=sgd,adam",)) == {"training.optimizer": ("sgd", "adam")}
    assert parse_compare(["--sweep", "training.steps=5,6"]).settings.groups["training.steps"] == (
        5,
        6,
    )


def test_a_sweep_over_words_has_no_ranges(tmp_path, capsys, monkeypatch):
    """Its page is a comparison with more groups: a matrix, and sentences on risk and level."""
    monkeypatch.setattr(simlab.simulator.compare, "write_report", write_report)
    words = [
        "--methods",
        "ppo",
        "none",
        "--lags",
        "1",
        "--seeds",
        "2",
        "--steps",
        "2",
        "--workers",
        "1",
        "--draws",
        "1",
    ]
    main(["compare", *words, "--sweep", "grid.dtype=bf16,fp8", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "no arm is separated from ppo" in said
    assert "stable grid.dtype" not in said
    page = (tmp_path / "run/report.html").read_text()
    assert "1, fp8" in page
    assert "Where each method is stable" not in page
