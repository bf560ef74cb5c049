"""`scaleup compare` without engines: what a folder of finished runs becomes."""

import json

import numpy as np
import polars as pl
import pytest

from scaleup import grid
from scaleup.metrics import claim
from scaleup.recipe import differs, load
from simlab.config import RunError
from simlab.page import commit

STEPS = 16  # the last eighth are two of them


def recipe(**changes):
    """Two arms at two lags, four seeds."""
    few = {"methods": ["grpo=ppo", "sat"], "lags": ["1", "8"], "training.steps": STEPS}
    return load("tiny_cpu", few | {k.replace("__", "."): v for k, v in changes.items()})


def row(cell, step):
    """A line of metrics.jsonl. SAT gains .25 at lag 1 with every seed, and at lag 8 with even ones."""
    gain = 0.25 if cell.lag == "1" or cell.seed % 2 == 0 else -0.25
    reward = 0.5 * step / STEPS + 0.01 * cell.seed + gain * (cell.arm.name == "sat")
    found = {"step": step, "reward": reward, "cut": 0.25, "updated": step != 3, "d_max": 0.5}
    found |= {"d_bar": 0.1, "kl_k3": 0.01, "age": 1.0, "age_max": int(cell.lag), "seconds": 60.0}
    if cell.arm.label.startswith("placebo"):
        found["reward"] += float(cell.arm.label.removeprefix("placebo"))
    return found | ({"gate_rate": 0.1} if cell.arm.name == "sat" else {})


def finish(spec, folder):
    """Runs of a recipe, as they leave their folders."""
    for cell in spec.cells():
        at = folder / "cells" / cell.name
        at.mkdir(parents=True)
        lines = [json.dumps(row(cell, step)) + "\n" for step in range(STEPS)]
        (at / "metrics.jsonl").write_text("".join(lines))
        claim(at, cell)
    return folder


@pytest.fixture
def idle(monkeypatch):
    """No engines can be started."""
    monkeypatch.setattr(grid, "cluster", lambda world: pytest.fail("an engine was started"))


def test_summary(idle, tmp_path):
    """Numbers by hand: final = mean of the last two steps, differences seed by seed."""
    spec = recipe()
    said = grid.compare(spec, "mine", finish(spec, tmp_path))
    found = pl.read_csv(tmp_path / "summary.csv")
    assert found["arm"].to_list() == ["grpo", "sat"] * 2
    assert found["lag"].to_list() == [1, 1, 8, 8]
    final = 0.5 * 14.5 / 16 + 0.015
    assert found["final"].to_list() == pytest.approx([final, final + 0.25, final, final])
    assert found["diff"].to_list() == pytest.approx([0, 0.25, 0, 0], abs=1e-12)
    # at lag 1 every seed gains .25: no width; at lag 8 two gain and two lose: t(.975, 3) sd / 2
    half = 3.182446 * 0.25 * np.sqrt(4 / 3) / 2
    assert found["diff_low"].to_list() == pytest.approx([0, 0.25, 0, -half], abs=1e-6)
    assert found["cut"].to_list() == [0.25] * 4
    assert found["skipped"].to_list() == [1] * 4  # the largest of a run
    assert found["gate_rate"].is_null().to_list() == [True, False, True, False]
    assert found["verdict"].to_list() == ["reference", "not separated"] * 2  # four seeds
    assert said[0].startswith("With 4 seeds no method is separated from grpo")
    assert said[1].startswith("1 of 2 differences have a Student-t interval")
    rows = pl.read_parquet(tmp_path / "results.parquet")
    assert len(rows) == 16 * STEPS
    assert rows["commit"].unique().to_list() == [commit()]
    assert {"arm", "arguments", "lag", "replay", "seed", "commit", "version"} <= set(rows.columns)


def test_verdicts_need_seeds_and_agreement(idle, tmp_path):
    """Twelve seeds that agree are a verdict; twelve that do not are none."""
    spec = recipe(seeds=12)
    said = grid.compare(spec, "mine", finish(spec, tmp_path))
    found = pl.read_csv(tmp_path / "summary.csv")
    assert found["verdict"].to_list() == ["reference", "above", "reference", "not separated"]
    assert said[0] == "sat at lag 1, replay none: above grpo, by +0.250 [+0.250, +0.250]."


@pytest.mark.parametrize(("size", "verdict"), [(".125", "above"), (".375", "not separated")])
def test_a_verdict_lies_outside_the_placebo_spread(idle, tmp_path, size, verdict):
    """SAT's .25 at lag 1 is a finding beside a placebo arm that is .125 off, and none beside .375."""
    spec = recipe(seeds=12, methods=["grpo=ppo", "sat", f"placebo{size}=ppo@1"], lags=["1"])
    said = grid.compare(spec, "mine", finish(spec, tmp_path))
    found = pl.read_csv(tmp_path / "summary.csv")
    assert found["placebo_spread"].to_list() == pytest.approx([float(size)] * 3)
    assert found["verdict"][1] == verdict
    assert "1 of 1 differences" in said[-3]  # a placebo arm is none
    assert "Of 1 placebo comparisons" in said[-2]


def test_a_second_call_writes_the_same(idle, tmp_path):
    """And the recipe of a folder is a recipe."""
    spec = recipe()
    grid.compare(spec, "mine", finish(spec, tmp_path))
    files = [p for p in tmp_path.rglob("*") if p.is_file() and "cells" not in p.parts]
    before = {p: p.read_bytes() for p in files}
    assert {"report.html", "learning_curves.svg", "final_difference.png"} <= {p.name for p in files}
    assert load(tmp_path / "recipe.toml") == spec
    grid.compare(spec, "mine", tmp_path)
    assert {p: p.read_bytes() for p in files} == before


def test_a_folder_of_other_runs(idle, tmp_path):
    """The setting that differs is named; what only says how often a run writes may differ."""
    finish(recipe(), tmp_path)
    grid.compare(recipe(world__engine__restarts=5, world__token_log_every=3), "mine", tmp_path)
    with pytest.raises(RunError, match=r"seed0: holds another run, its training\.lr differs; cho"):
        grid.compare(recipe(training__lr=1e-3), "mine", tmp_path)


def test_only_what_is_missing_is_run(tmp_path, monkeypatch):
    """A run that lacks its last step goes on, and no other."""
    spec = recipe()
    lost = spec.cells()[5]
    path = finish(spec, tmp_path) / "cells" / lost.name / "metrics.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    asked = []

    class Cluster:
        """Notes what is asked of it."""

        def __init__(self, world):
            assert world == spec.world

        def __enter__(self):
            def run(cell, folder):
                asked.append((cell, folder))
                yield row(cell, STEPS - 1)
                path.write_text(whole)

            return run

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(grid, "cluster", Cluster)
    grid.compare(spec, "mine", tmp_path)
    assert asked == [(lost, tmp_path / "cells" / lost.name)]


def test_ages_and_mismatch_come_from_the_token_log(idle, tmp_path):
    """Tokens outside of the mask are left out; age and |d| are differences of the columns."""
    spec = recipe()
    log = finish(spec, tmp_path) / "cells" / spec.cells()[0].name / "token_log"
    log.mkdir()
    pl.DataFrame(
        {
            "trainer_version": [9, 9],
            "loss_mask": [[1, 0], [1]],
            "weight_versions": [[8, 8], [2]],
            "trainer_logprobs": [[-1.0, -9.0], [-2.0]],
            "rollout_logprobs": [[-1.5, -1.0], [-1.0]],
        }
    ).write_parquet(log / "step_00000009.parquet")
    found = grid.histograms([("1", log)]).axes[0].patches
    assert [(p.get_x() + p.get_width() / 2, p.get_height()) for p in found] == [(1, 0.5), (7, 0.5)]
    grid.compare(spec, "mine", tmp_path)
    assert (tmp_path / "figures" / "age_and_mismatch.png").exists()


def test_a_column_without_numbers(idle, tmp_path):
    """d_bar that was never finite leaves its sentence out, not the report."""
    spec = recipe(lags=["1"])
    finish(spec, tmp_path)
    for path in tmp_path.glob("cells/*/metrics.jsonl"):
        path.write_text(path.read_text().replace('"d_bar": 0.1', '"d_bar": null'))
    said = grid.compare(spec, "mine", tmp_path)
    assert not any(x.startswith("Lag") for x in said)
    assert (tmp_path / "report.html").exists()


def test_one_arm_is_compared_with_nothing(idle, tmp_path):
    """Curves, and no sentence or figure about differences."""
    spec = recipe(methods=["grpo=ppo"])
    said = grid.compare(spec, "mine", finish(spec, tmp_path))
    assert [x.split(",")[0] for x in said] == ["Lag 1", "Lag 8"]
    assert (tmp_path / "figures" / "learning_curves.png").exists()
    assert not (tmp_path / "figures" / "final_difference.png").exists()


def test_differs_names_the_setting():
    """Dotted, whichever side misses it."""
    assert differs({"a": 1, "b": {"c": 1}}, {"a": 1, "b": {"c": 1}}) is None
    assert differs({"a": 1, "b": {"c": 1}}, {"a": 1, "b": {"c": 2}}) == "b.c"
    assert differs({"b": {}}, {"b": {"c": 2}}) == "b.c"
    assert differs({"b": {"c": 2}}, {"b": 3}) == "b"
