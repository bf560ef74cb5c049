"""The command: what it prints and writes, its exit codes, and a sentence for every bad file; and the function."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from audit.cases import rows_of, small, wrote

import simlab
from simlab.__main__ import main
from simlab.core.tokens import TokenBatch

REAL = Path(__file__).parents[1] / "data" / "smollm2_lag8.jsonl"


def run(capsys, *words):
    """(exit code, stdout, stderr)"""
    with pytest.raises(SystemExit) as stop:
        main(["audit", *map(str, words)])
    return stop.value.code, *capsys.readouterr()


def test_a_screen_and_two_files(tmp_path, capsys):
    """Findings first; audit.json holds the same and no NaN; a rerun writes the same bytes."""
    code, out, _ = run(
        capsys, REAL, "--out", tmp_path / "a", "--methods", "ppo", "sat:alpha=0.8", "gspo+tis"
    )
    assert code == 0
    assert out.index("Nothing fired") < out.index("d_bar") < out.rindex("sat:alpha=0.8")
    text = (tmp_path / "a" / "audit.json").read_text()
    result = json.loads(text, parse_constant=pytest.fail)
    assert [x["method"] for x in result["methods"]] == ["ppo", "sat:alpha=0.8", "gspo+tis"]
    assert {x["metric"] for x in result["checked"]} >= {"shift", "temperature", "ess"}
    assert all(x["next"] for x in result["findings"] if x["status"] == "alarm")
    words = ("--json", "--methods", "ppo", "sat:alpha=0.8", "gspo+tis")
    assert run(capsys, REAL, *words)[1] == text


def test_exit_codes(tmp_path, capsys):
    """0 clean, 1 alarms, 2 unusable, 3 partly unusable; --json prints and writes nothing."""
    trainer, rollout = small(rows=40)
    moved, some = np.roll(trainer, -1, 1), trainer.copy()
    some[::4] = moved[::4]
    logs = {0: trainer, 1: rollout, 2: moved, 3: some}
    for want, column in logs.items():
        path = wrote(tmp_path, rows_of(column, rollout))
        code, out, _ = run(capsys, path, "--json", "--methods", "ppo")
        assert code == want == json.loads(out)["exit"]
    assert [x.name for x in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.jsonl"], "nothing.jsonl: cannot be read (No such file or directory)"),
        (["LOG", "--map", "trainer"], "--map: 'trainer' is not role=column; roles are trainer"),
        (["LOG", "--map", "trainer=x"], "column x, named as trainer, is missing"),
        (["LOG", "--methods", "pppo"], "pppo"),
        (["LOG", "--out", "/proc/x"], "/proc/x"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, capsys, words, says):
    """Exit code 2, one line."""
    path = wrote(tmp_path, rows_of(*small()))
    code, _, err = run(capsys, *(path if x == "LOG" else x for x in words))
    assert code == 2
    assert err.count("\n") == 1
    assert says in err


def test_an_unknown_file_is_told_what_to_say(tmp_path, capsys):
    """Columns seen, and the line to try."""
    trainer, rollout = small()
    rows = [
        {"logp_train": list(t), "engine_lp": list(r)} for t, r in zip(trainer, rollout, strict=True)
    ]
    path = wrote(tmp_path, rows)
    code, _, err = run(capsys, path)
    assert code == 2
    assert "columns: logp_train, engine_lp" in err
    assert "--map trainer=logp_train,rollout=engine_lp" in err
    assert (
        run(
            capsys,
            path,
            "--json",
            "--map",
            "trainer=logp_train,rollout=engine_lp",
            "--methods",
            "ppo",
        )[0]
        == 0
    )


def test_the_function_takes_a_batch():
    """Micro-batches of a trainer; the mask hides what it hides, and no file is needed."""
    trainer, rollout = (torch.tensor(x).flatten() for x in small(rows=40))
    mask = torch.arange(240) % 6 != 5
    batch = TokenBatch(
        logp=torch.where(mask, trainer, torch.nan), logp_mu=rollout, advantage=torch.ones(240), mask=mask,
        response=torch.arange(240) // 6, age=torch.zeros(240, dtype=torch.int64),
    )  # fmt: skip
    halves = [batch.take(torch.arange(120)), batch.take(torch.arange(120, 240))]
    whole, cut = simlab.audit(batch, methods=None), simlab.audit(halves)
    assert whole.exit == cut.exit == 0
    assert whole.result["counts"]["measured"] == cut.result["counts"]["measured"] == 200
    want = (trainer - rollout)[mask].abs().mean()
    assert whole.result["mismatch"]["d_bar"] == pytest.approx(float(want))
    assert whole.result["mismatch"] == cut.result["mismatch"]
    assert simlab.mismatch([batch])["d_bar"] == pytest.approx(float(want))
