"""What a run writes besides its rows' numbers: JSON lines that survive stops, Weights & Biases."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import polars as pl
import pytest

from scaleup.__main__ import main
from scaleup.recipe import load
from scaleup.run import metrics
from scaleup.run.closing import closing, curve
from scaleup.run.metrics import Metrics, read
from simlab.study.settings import RunError

RUN = load("tiny_cpu").cells()[0]


def test_metrics_on_a_full_disk(tmp_path):
    """A line that does not fit is taken back."""
    held = Metrics(tmp_path, RUN, 0)
    held.add({"step": 0, "reward": 0.5})

    class Full:
        """Takes half a line."""

        def __init__(self, file):
            self.file, self.tell, self.truncate = file, file.tell, file.truncate
            self.close = file.close

        def write(self, line):
            return self.file.write(line[: len(line) // 2])

    held._file = Full(held._file)
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written \(No space left"):
        held.add({"step": 1, "reward": 0.25})
    held.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "reward": 0.5}\n'


def test_a_finished_run_is_left_alone(tmp_path, capsys):
    """The same command on a run that is done says so, and starts nothing."""
    spec = load("tiny_cpu", {"training.steps": 2}).cells()[0]
    held = Metrics(tmp_path, spec, 0)
    trained = {"grad_norm": 1.0, "tokens": 64, "unlike_ppo": 0.0, "flat_groups": 0.0}
    for step in range(2):
        assert not metrics.finished(tmp_path, spec)
        held.add({"step": step, "reward": 0.5} | trained)
    held.close()
    before = (tmp_path / "metrics.jsonl").read_text()
    main(["run", "tiny_cpu", "--out", str(tmp_path), "--set", "training.steps=2"])
    said = capsys.readouterr().out
    assert said.startswith("all steps were done before")
    assert "reward 0.500 ▁▁ 0.500 in 2 logged steps" in said
    assert "next: scaleup compare tiny_cpu" in said
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_the_closing_words(tmp_path):
    """A curve of at most 40 bars from the least to the largest reward, and the restarts of engines."""
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve([]) == ""
    long = curve([i / 999 for i in range(1000)])
    assert (len(long), long[0], long[-1]) == (40, "▁", "█")
    rows = pl.DataFrame({"reward": [0.1, 0.9], "seconds": [2.0, 3.0], "engine_restarts": [0, 2]})
    said = closing(rows, "tiny_cpu")
    assert said.startswith(
        "reward 0.100 ▁█ 0.900 in 2 logged steps, 3 s\nengines were restarted 2 times"
    )


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"settings": null}', '{"settings": {}, "version": "1"}']
)
def test_settings_that_cannot_be_read(tmp_path, text):
    """A damaged settings.json is a sentence that names it."""
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(
        RunError, match=r"settings\.json: does not say which run the folder holds|holds another"
    ):
        metrics.record(tmp_path, RUN)


def test_wandb_is_given_one_run(tmp_path, monkeypatch):
    """Where it is asked for: a run that resumes is the same one, another folder is another."""
    begun, logged = [], []
    fake = SimpleNamespace(
        log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: None
    )
    module = SimpleNamespace(init=lambda **more: begun.append(more) or fake)
    found = metrics.importlib.util.find_spec
    monkeypatch.setattr(
        metrics.importlib.util, "find_spec", lambda name: name == "wandb" or found(name)
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for folder in ("a", "a", "b"):
        held = Metrics(tmp_path / folder, RUN, 0)
        held.add({"step": 0, "reward": 0.5, "samples": "no number"})
        held.close()
    assert begun[0]["id"] == begun[1]["id"] != begun[2]["id"]
    assert begun[0]["config"]["training"]["lr"] == 3e-3
    assert logged == [(0, {"reward": 0.5})] * 3


def test_metrics_before_the_resumed_step_stay(tmp_path):
    """Lines from the resumed step on go, and a last line that was cut."""
    held = Metrics(tmp_path, RUN, 0)
    for step in range(4):
        held.add({"step": step, "reward": step / 4, "seconds": float(step), "odd": float("nan")})
    held.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    again = Metrics(tmp_path, RUN, 2)
    again.add({"step": 2, "reward": 9.0})
    again.close()
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1] == {"step": 1, "reward": 0.25, "seconds": 1.0, "odd": None}
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[2])["reward"] == 9.0
