"""`simlab promote`, asked of the committed comparisons."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from simlab.__main__ import main

COMMITTED = Path(__file__).parents[2] / "reports/compare"
E0, E1, E2 = (str(COMMITTED / name) for name in ("e0", "e1", "e2"))


def promote(*words):
    """Exit code."""
    try:
        main(["promote", *map(str, words)])
    except SystemExit as stop:
        return stop.code
    return 0


def test_a_method_that_holds_everywhere_has_a_recipe(tmp_path, capsys):
    """Dual clip: no verdict against it under either optimizer, and a wider range of learning rates."""
    assert promote("ppo-dual", "--from", E1, E2, "--map", E0, "--out", tmp_path) == 0
    said = capsys.readouterr().out
    assert "FAILS" not in said
    assert "lag 24: 6 values against 3" in said
    assert said.count("not measured") == 2  # no log, no promotion study
    text = (tmp_path / "miniature.toml").read_text()
    assert tomllib.loads(text) == {
        "base": "tiny_grid",
        "methods": ["ppo", "ppo-dual=ppo:dual_clip=3"],
        "reference": "ppo",
        "seeds": 10,
    }
    assert "# not measured: the simulator predicts this regime" in text
    assert promote("ppo-dual", "--from", E1, "--out", tmp_path) == 2
    assert "is there already and is left alone" in capsys.readouterr().err
    assert (tmp_path / "miniature.toml").read_text() == text


def test_a_method_that_fails_somewhere_is_refused(tmp_path, capsys):
    """KPop fails less often than PPO under SGD and more often under Adam; --force records it."""
    out = tmp_path / "out"
    assert promote("kpop", "--from", E1, E2, "--out", out) == 1
    said = capsys.readouterr().out
    assert "fails more than ppo at lag 24, lag 48" in said
    assert "kpop is not promoted: e2: risk against ppo" in said
    assert not out.exists()
    assert promote("kpop", "--from", E1, E2, "--out", out, "--force") == 0
    assert (
        (out / "miniature.toml")
        .read_text()
        .startswith("# kpop, promoted by simlab promote with --force: e2: risk")
    )


def test_the_second_rung_reads_the_miniature(tmp_path, capsys):
    """A miniature without a verdict against the method gives the large recipe; one with it does not."""
    for name, code in (("e1", 0), ("e2", 1)):
        shutil.copytree(COMMITTED / name, tmp_path / name)
        out = tmp_path / f"out_{name}"
        assert promote("kpop", "--from", E1, "--miniature", tmp_path / name, "--out", out) == code
        assert (out / "qwen3_30b_a3b.toml").exists() == (code == 0)
    assert tomllib.loads((tmp_path / "out_e1/qwen3_30b_a3b.toml").read_text())["seeds"] == 2


@pytest.mark.parametrize(("acts", "code"), [(True, 0), (False, 1)])
def test_a_rule_that_does_not_act_on_the_log(tmp_path, acts, code):
    """The audit's table decides, for a method at its defaults."""
    log = tmp_path / "audit.json"
    row = {"method": "kpop", "acts": acts, "cut": 0.01 * acts, "capped": 0.0, "raised": 0.0}
    log.write_text(json.dumps({"methods": [row]}))
    assert promote("kpop", "--from", E1, "--log", log, "--out", tmp_path / "out") == code


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["satt", "--from", E1], "'satt' is none of its arms"),
        (["ppo", "--from", E1], "'ppo' is none of its arms besides the reference"),
        (["sat", "--from", "no/such"], "no/such: has no summary.csv"),
        (["sat", "--from", E1, "--map", E1], "has no map.csv"),
        (["kpop", "--from", E1, "--log", f"{E1}/config.toml"], "is no audit.json"),
        (["sat", "--from", E1, str(COMMITTED / "sat_gates")], "'sat' is none of its arms"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(words, says, tmp_path, capsys):
    """Exit code 2 and nothing written."""
    assert promote(*words, "--out", tmp_path / "out") == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
