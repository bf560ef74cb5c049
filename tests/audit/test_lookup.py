"""What the committed studies say about a regime."""

import json

import polars as pl
import pytest

from simlab.__main__ import main
from simlab.audit.command import CHECKOUT
from simlab.audit.lookup import lookup


def study(folder, lags, d_bar, two=True, lr=0.1):
    """A study with ppo, sat and gspo; gspo is separated at its first lag."""
    rows = []
    for i, lag in enumerate(lags):
        for arm in ("ppo", "sat", "gspo", "placebo-draws"):
            mine = {
                "arm": arm,
                "method": arm if arm != "placebo-draws" else "ppo",
                "lag": lag,
                "seeds": 24,
                "d_bar": d_bar * (i + 1),
                "typical": -0.1,
            }
            level = (
                "reference"
                if arm == "ppo"
                else "below"
                if (arm, i) == ("gspo", 0)
                else "not separated"
            )
            risk = (
                "reference"
                if arm == "ppo"
                else "fails less"
                if (arm, i) == ("sat", 1)
                else "not separated"
            )
            rows.append(mine | ({"risk": risk, "level": level} if two else {"verdict": level}))
    folder.mkdir(parents=True)
    pl.DataFrame(rows).write_csv(folder / "summary.csv")
    (folder / "config.toml").write_text(f"[training]\nlr = {lr}\n")  # fmt: skip


def test_the_nearest_cell_of_each_study(tmp_path):
    """Risk and level, or the one verdict of older tables; placebos are no corrections; no data is said."""
    study(tmp_path / "a" / "new", ["4", "8"], 0.01)
    study(tmp_path / "b", ["fully_async:max_age=8"], 0.03, two=False)
    study(tmp_path / "far", ["8"], 1.0)
    study(tmp_path / "null", ["8"], 0.02, lr=0)
    found = lookup(tmp_path, 0.02, 8)
    assert found["cells"].pop()["run"] == "far"
    assert [(x["run"], x["at"]) for x in found["cells"]] == [
        ("a/new", "lag 8"),
        ("b", "lag fully_async:max_age=8"),
    ]
    new, old = found["cells"]
    assert [(x["arm"], x["verdict"]) for x in new["separated"]] == [("sat", "fails less")]
    assert [x["arm"] for x in new["not_separated"]] == ["gspo"]
    assert [(x["arm"], x["verdict"]) for x in old["separated"]] == [("gspo", "below")]
    assert "kpop" in found["no_data"]
    assert "sat" not in found["no_data"]
    assert [x.split()[0] for x in found["left_out"]] == ["null"]
    assert [x["run"] for x in lookup(tmp_path, 1.0, 8, most=1)["cells"]] == ["far"]
    assert [x["far"] for x in lookup(tmp_path, 0.02, 8)["cells"]] == [False, False, True]
    assert "far, lag 8 and mean |d| 1, is farther" in lookup(tmp_path, 0.02, 8, most=2)["left_out"]
    with pytest.raises(ValueError, match="holds no summary"):
        lookup(tmp_path / "a" / "none", 0.02, 8)


def test_the_committed_studies():
    """Each verdict that is shown is that of its file."""
    found = lookup(CHECKOUT, 0.02, 8)
    assert found["cells"]
    for cell in found["cells"]:
        table = pl.read_csv(CHECKOUT / cell["run"] / "summary.csv", infer_schema_length=None)
        assert cell["separated"] or cell["not_separated"]
        for row in cell["separated"]:
            same = table.filter(pl.col("arm") == row["arm"])
            said = {
                x
                for name in ("risk", "level", "verdict")
                if name in table.columns
                for x in same[name]
            }
            assert set(row["verdict"].split(", ")) <= said


def test_the_command(tmp_path, capsys):
    """A regime from options or from an audit; one sentence where it is missing."""
    study(tmp_path / "r" / "a", ["8"], 0.02)
    audit = tmp_path / "audit.json"
    audit.write_text(json.dumps({"mismatch": {"d_bar": 0.02, "age": 7.5}}))
    main(["lookup", "--from", str(audit), "--reports", str(tmp_path / "r")])
    out = capsys.readouterr().out
    assert "a at lag 8: mean |d| 0.02, 24 seeds, against ppo" in out
    assert "below: gspo (median difference -0.1)" in out
    assert "not separated: sat" in out
    main(["lookup", "--d-bar", "0.02", "--lag", "8", "--reports", str(tmp_path / "r"), "--json"])
    assert json.loads(capsys.readouterr().out)["cells"][0]["run"] == "a"
    audit.write_text(json.dumps({"mismatch": {"d_bar": 0.02}}))
    for words, says in (
        (["--lag", "8"], "--d-bar is missing: give it"),
        (["--from", str(audit)], "audit.json does not say it"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["lookup", *words])
        assert stop.value.code == 2
        assert says in capsys.readouterr().err
