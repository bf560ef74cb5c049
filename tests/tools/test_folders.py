"""Run folders on a terminal: shown, compared, and their figures drawn in a paper's size."""

import json
import shutil

import polars as pl
import pytest
from matplotlib.image import imread

from simlab.tools.figure import run_figure
from simlab.tools.folders import different, run_diff, run_show


def test_show_prints_every_row(run, capsys):
    """The verdict of every arm, and where the report is."""
    run_show([str(run)])
    said = capsys.readouterr().out
    assert all(word in said for word in ("none", "ppo@1", "reference", "failed", "report.html"))
    run_show([str(run), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [x["arm"] for x in rows if x["lag"] == 1] == ["ppo", "none", "ppo@1"]


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path):
    """For each command."""
    for call in (lambda: run_show([str(tmp_path)]), lambda: different(tmp_path, tmp_path)):
        with pytest.raises(ValueError, match=r"no finished run folder|no run folder"):
            call()
    with pytest.raises(ValueError, match=r"has no config.toml"):
        run_figure([str(tmp_path), "risk"])


def test_diff_names_settings_arms_and_numbers(run, tmp_path, capsys):
    """Exit code 0 for equal folders, 1 where a setting, a row or a number differs."""
    with pytest.raises(SystemExit) as stopped:
        run_diff([str(run), str(run)])
    assert stopped.value.code == 0
    other = tmp_path / "two"
    shutil.copytree(run, other)
    config = (run / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace("steps = 8", "steps = 9"))
    table = pl.read_csv(run / "summary.csv").filter(
        ~((pl.col("lag") == 1) & (pl.col("arm") == "none"))
    )
    changed = pl.when(pl.col("arm") == "ppo@1").then(0.125).otherwise(pl.col("final"))
    table.with_columns(changed.alias("final")).write_csv(other / "summary.csv")
    with pytest.raises(SystemExit) as stopped:
        run_diff([str(run), str(other)])
    said = capsys.readouterr().out
    assert stopped.value.code == 1
    assert "training.steps: 8 | 9\n" in said
    assert f"only {run}: lag 1: none\n" in said
    assert "arm ppo@1, lag 0: final 0." in said
    assert "| 0.125" in said


def test_a_figure_has_the_width_of_a_column(run, tmp_path):
    """3.25 inches at 300 dots an inch; the same bytes again; an unknown name is a sentence."""
    out = tmp_path / "risk.png"
    run_figure([str(run), "risk", "--width", "3.25", "--format", "png", "--out", str(out)])
    assert imread(out).shape[1] == 975
    first = out.read_bytes()
    run_figure([str(run), "risk", "--width", "3.25", "--format", "png", "--out", str(out)])
    assert out.read_bytes() == first
    with pytest.raises(ValueError, match="no figure 'risks'; there are learning_curves"):
        run_figure([str(run), "risks"])
