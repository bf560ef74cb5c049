"""Two logs, before and after a fix."""

import json
from pathlib import Path

import numpy as np
import pytest
from audit.cases import of_gaps, of_rows, rows_of, small, wrote

from simlab.__main__ import main
from simlab.audit.compare import compare

REAL = Path(__file__).parents[1] / "data" / "smollm2_lag8.jsonl"


def noise(seed, size=0.05, responses=60, tokens=20, tail=False):
    rng = np.random.default_rng(seed)
    z = rng.standard_t(4, (responses, tokens)) if tail else rng.normal(size=(responses, tokens))
    return z * size * np.exp(0.3 * rng.normal(size=(responses, 1)))


def rows(difference):
    return {x["name"]: x for x in difference["rows"]}


def test_a_fix_that_halves_the_gap(tmp_path):
    """Lower where the gap went, with an interval around the true difference; PPO cuts nothing in either."""
    (tmp_path / "a").mkdir()
    before, after = (
        of_gaps(tmp_path / "a", noise(0).tolist()),
        of_gaps(tmp_path, noise(1, 0.025).tolist()),
    )
    found = rows(compare(before, after))
    d_bar = found["d_bar"]
    assert d_bar["before"] == pytest.approx(before.result["mismatch"]["d_bar"])
    assert d_bar["after"] == pytest.approx(after.result["mismatch"]["d_bar"])
    assert d_bar["difference"] == pytest.approx(d_bar["after"] - d_bar["before"])
    assert d_bar["verdict"] == "lower"
    assert d_bar["low"] < -0.025 * np.sqrt(2 / np.pi) * np.exp(0.045) < d_bar["high"]
    assert found["ess"]["before"] == pytest.approx(before.result["mismatch"]["ess"])
    assert found["ess"]["verdict"] == "higher"
    assert found["d_mean"]["verdict"] == "not separated"
    assert found["cut by seqclip"]["after"] < found["cut by seqclip"]["before"]


@pytest.mark.slow
def test_equal_logs_are_rarely_separated(tmp_path):
    """Any row of a pair of logs of one process: 5 % of the pairs are expected."""
    separated = 0
    for seed in range(40):
        pair = [of_gaps(tmp_path, noise([seed, i]).tolist()) for i in range(2)]
        found = compare(*pair, methods=[("ppo", "ppo", {})])
        separated += any(x["verdict"] != "not separated" for x in found["rows"])
    assert separated <= 5


def test_what_fired_before_and_after(tmp_path):
    """Gone, new and still there; an unusable log and a short one say so."""
    trainer, rollout = small(rows=40)
    copy = of_rows(tmp_path, rows_of(rollout, rollout))
    clean = of_rows(tmp_path, rows_of(trainer, rollout))
    shifted = of_rows(tmp_path, rows_of(np.roll(trainer, -1, 1), rollout))
    found = compare(copy, clean)
    assert (found["gone"], found["new"], found["still"]) == (["identical"], [], [])
    found = compare(clean, shifted)
    assert found["new"] == ["shift"]
    assert "has no token that can be measured" in found["not_computable"]
    few = of_rows(tmp_path, rows_of(trainer[:4], rollout[:4]))
    assert {x["verdict"] for x in compare(few, clean)["rows"]} == {"too few responses"}


def test_the_command(tmp_path, capsys):
    """The second log's exit code; a table on the screen, in audit.json and in the page."""
    path = wrote(tmp_path, rows_of(*small(rows=40)))
    words = ["audit", str(REAL), path, "--methods", "ppo", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(words)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "cut by ppo" in out
    assert "lower" in out
    result = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert result["compare"]["before"] == str(REAL)
    assert rows(result["compare"])["d_bar"]["verdict"] == "lower"
    assert 'id="difference"' in (tmp_path / "out" / "report.html").read_text()
