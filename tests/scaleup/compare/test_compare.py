"""`scaleup compare` without engines: what a folder of finished runs becomes."""

import json

import numpy as np
import polars as pl
import pytest

from scaleup.compare import compare as grid
from scaleup.recipe import differs, load
from scaleup.run.metrics import claim
from simlab.study.files import commit
from simlab.study.settings import RunError

STEPS = 16  # the last eighth are two of them


def recipe(**changes):
    """Two arms at two lags, four seeds."""
    few = {"methods": ["grpo=ppo", "sat"], "lags": ["1", "8"], "training.steps": STEPS}
    few |= {"draws": 1, "healthy_lag": "1"}
    return load("tiny_cpu", few | {k.replace("__", "."): v for k, v in changes.items()})


def row(cell, step):
    """A line of metrics.jsonl. SAT gains 0.25 at lag 1 with every seed, and at lag 8 with even ones."""
    gain = 0.25 if cell.lag == "1" or cell.seed % 2 == 0 else -0.25
    reward = 0.5 * step / STEPS + 0.01 * cell.seed + gain * (cell.arm.name == "sat")
    found = {
        "step": step,
        "reward": reward,
        "cut": 0.25,
        "unlike_ppo": 0.1,
        "updated": step != 3,
        "d_max": 0.5,
        "tokens": 30,
        "grad_norm": 0.5,
        "flat_groups": 0.25,
    }
    found |= {"d_bar": 0.1, "k3": 0.01, "age": 1.0, "age_max": int(cell.lag), "seconds": 60.0}
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
    # at lag 8 two seeds gain 0.25 and two lose it: t(0.975, 3) sd / 2
    half = (
        3.182446 * np.std(final + 0.25 * np.array([1, -1, 1, -1]) + 0.01 * np.arange(4), ddof=1) / 2
    )
    assert found["final_low"][3] == pytest.approx(final - half, abs=1e-6)
    assert found["cut"].to_list() == [0.25] * 4
    assert found["skipped_steps"].to_list() == [4] * 4  # one of each run
    assert found["collapsed"].to_list() == [0] * 4
    assert found["diverged"].to_list() == [0] * 4
    assert found["gate_rate"].is_null().to_list() == [True, False, True, False]
    assert found["level"].to_list() == ["reference", "too few lived"] * 2  # four seeds
    assert found["risk"].to_list() == ["reference", "not separated"] * 2
    assert found["bar"].to_list() == pytest.approx([0.7 * final] * 4)
    assert said[1].startswith("Lag 1, replay none and Lag 8, replay none: no arm is separated")
    assert "no shift where runs live" in said[2]
    rows = pl.read_parquet(tmp_path / "results.parquet")
    assert len(rows) == 16 * STEPS
    assert rows["commit"].unique().to_list() == [commit()]
    assert {"arm", "arguments", "lag", "replay", "seed", "commit", "version"} <= set(rows.columns)


def test_collapse_and_divergence_have_columns(idle, tmp_path):
    """A run whose reward falls to nothing collapsed; one whose last gradient was not finite diverged."""
    spec = recipe(lags=["1"])
    finish(spec, tmp_path)
    for cell in spec.cells():
        if cell.arm.name == "sat" and cell.seed < 3:
            lines = [row(cell, step) for step in range(STEPS)]
            for line in lines[-4:]:
                line["reward"] = 0.01
            lines[-1]["updated"] = cell.seed != 0
            file = tmp_path / "cells" / cell.name / "metrics.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = grid.compare(spec, "mine", tmp_path)
    found = pl.read_csv(tmp_path / "summary.csv")
    assert found["collapsed"].to_list() == [0, 3]
    assert found["diverged"].to_list() == [0, 1]
    assert any("3 of 8 runs collapsed (sat at lag 1, replay none: 3)" in x for x in said)


def test_results_of_both_worlds_are_one_table(idle, tmp_path):
    """Files of the simulator and of real engines concatenate: a shared column means and is the same."""
    from simlab.simulator.compare import compare as simulate
    from simlab.simulator.config import Config

    spec = recipe(seeds=2, lags=["1"])
    grid.compare(spec, "mine", finish(spec, tmp_path / "engines"))
    small = {"prompts": 2, "horizon": 3, "vocab": 3, "answers": 2}
    toy = Config(world=small, training={"steps": 2}, methods=("ppo",), lags=("1",), seeds=2)
    simulate(toy, "e1", tmp_path / "toy", workers=1)
    one, two = (pl.read_parquet(tmp_path / x / "results.parquet") for x in ("engines", "toy"))
    both = pl.concat([one, two], how="diagonal_relaxed")
    assert len(both) == len(one) + len(two)
    assert {"d_bar", "cut", "reward", "age", "age_max"} <= set(one.columns) & set(two.columns)


def test_verdicts_need_seeds_and_agreement(idle, tmp_path):
    """Twelve seeds that agree are a verdict; twelve that do not are none."""
    spec = recipe(seeds=12)
    said = grid.compare(spec, "mine", finish(spec, tmp_path))
    found = pl.read_csv(tmp_path / "summary.csv")
    assert found["level"].to_list() == ["reference", "above", "reference", "not separated"]
    assert said[1].endswith("above it where neither failed (median): sat (+0.250).")


def test_a_recipe_has_draws_of_its_reference_and_a_healthy_lag(idle, tmp_path):
    """Three draws, pooled, which alone run at lag 0; the page counts verdicts among them."""
    spec = recipe(seeds=12, lags=["8"], draws=3, healthy_lag="0")
    assert [(x.arm.label, x.lag) for x in spec.cells()[:7]] == [
        *[(arm, "8") for arm in ("grpo", "sat", "grpo@1", "grpo@2")],
        *[(arm, "0") for arm in ("grpo", "grpo@1", "grpo@2")],
    ]
    said = grid.compare(spec, "mine", finish(spec, tmp_path))
    found = pl.read_csv(tmp_path / "summary.csv")
    assert found["arm"].to_list() == ["grpo", "sat", "grpo@1", "grpo@2"]
    assert any(
        "of 2 comparisons of grpo with its own other draws, none is separated" in x for x in said
    )
    page = (tmp_path / "report.html").read_text()
    assert page.count('<span class="soft">placebo</span>') == 2
    assert {x.name for x in (tmp_path / "figures").glob("*.pdf")} >= {
        "risk.pdf",
        "level.pdf",
        "profiles.pdf",
    }


def test_a_second_call_writes_the_same(idle, tmp_path):
    """And the recipe of a folder is a recipe."""
    spec = recipe()
    grid.compare(spec, "mine", finish(spec, tmp_path))
    files = [p for p in tmp_path.rglob("*") if p.is_file() and "cells" not in p.parts]
    before = {p: p.read_bytes() for p in files}
    assert {"report.html", "learning_curves.svg", "level.png", "runs.parquet"} <= {
        p.name for p in files
    }
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
    assert not any("d_bar" in x for x in said)
    assert (tmp_path / "report.html").exists()


def test_one_arm_is_compared_with_nothing(idle, tmp_path):
    """Curves, collapse, and no sentence or figure about differences."""
    spec = recipe(methods=["grpo=ppo"])
    said = grid.compare(spec, "mine", finish(spec, tmp_path))
    assert said[1].startswith("0 of 8 runs collapsed")
    assert [x.split(",")[0] for x in said[2:]] == ["Lag 1", "Lag 8"]
    assert (tmp_path / "figures" / "learning_curves.png").exists()
    assert not (tmp_path / "figures" / "level.png").exists()


def test_differs_names_the_setting():
    """Dotted, whichever side misses it."""
    assert differs({"a": 1, "b": {"c": 1}}, {"a": 1, "b": {"c": 1}}) is None
    assert differs({"a": 1, "b": {"c": 1}}, {"a": 1, "b": {"c": 2}}) == "b.c"
    assert differs({"b": {}}, {"b": {"c": 2}}) == "b.c"
    assert differs({"b": {"c": 2}}, {"b": 3}) == "b"
