"""A claim of a user's file: attacked, caught when false, refused in one sentence with file and line."""

import json

import pytest

from simlab.__main__ import main
from simlab.study.files import ROOT
from simlab.verify.formulas import mathml

EXAMPLE = ROOT / "examples/my_claim.py"


def verify(*words):
    with pytest.raises(SystemExit) as stop:
        main(["verify", *map(str, words)])
    return stop.value.code


def test_the_example_holds_and_a_false_one_leaves_its_counterexample(tmp_path, capsys):
    """chi2 in place of its root is false; its instance can be checked alone."""
    out = tmp_path / "out"
    assert verify("--claim-file", EXAMPLE, "--budget", 0.02, "--out", out) == 0
    assert "claim 100" in capsys.readouterr().out
    data = json.loads((out / "claims.json").read_text())
    assert [c["claim"] for c in data["claims"]] == [100]
    assert "<math" in (out / "report.html").read_text()
    bad = tmp_path / "bad.py"
    text = EXAMPLE.read_text().replace("np.sqrt(chi2) / 2)]", "chi2 / 2)]")
    bad.write_text(text[: text.index("def tight")] + "def tight():\n    return []\n")
    assert verify("--claim-file", bad, "--budget", 0.02, "--out", out) == 1
    assert f"simlab verify --claim-file {bad} --claim 100 --instance" in capsys.readouterr().out
    words = ["--claim", 100, "--instance", out / "counterexample-100.json"]
    assert verify("--claim-file", bad, *words) == 1
    assert verify("--claim-file", EXAMPLE, *words) == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("NUMBER, TITLE = 100", "NUMBER, TITLE = 4", "NUMBER 4 is taken"),
        ("NUMBER, TITLE = 100", "NUMBER, TITLE = 'x'", "NUMBER must be an int"),
        ("def decode(", "def decoded(", "has no function decode"),
        ("[Side(", "[tuple(", "line: sides failed (TypeError"),
        ('x[: shape["V"]])\n    return', 'x[: shape["W"]])\n    return', "line: decode failed (KeyError"),
        ("import numpy as np", "import numpy as", "line: SyntaxError"),
        ("SHAPES = [", "SHAPES = 1 / 0 * [", "line: ZeroDivisionError"),
        ('SHAPES = [{"V": V} for V in (2, 5)]', "SHAPES = []", "SHAPES must hold a dict"),
        ('2 * shape["V"]\n', '-shape["V"]\n', "size({'V': 2}) is -2"),
        ("chi2)/2\", 1.0)]", "chi2)/2\", 0.5)]", "tight says 0.5"),
        ("chi2)/2\", 1.0)]", "\", 1.0)]", "tight names the side"),
        ("(r - 1)^2}$", "(r - 1)^2}", "STATEMENT has an odd number of dollar signs"),
        ("    return [Side", "    return None and [Side", "sides gives no list"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(old, new, says, tmp_path, capsys):
    """Exit 2; the file, and the line where there is one; nothing is written."""
    path, text = tmp_path / "mine.py", EXAMPLE.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert verify("--claim-file", path, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err.strip()
    line = text[: text.index(old)].count("\n") + 1
    where = f"{path}:{line}" if says.startswith("line") else str(path)
    assert f"{where}: {says.removeprefix('line: ')}" in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def test_formulas():
    """Text is escaped, formulas are MathML, bad LaTeX is a sentence."""
    assert str(mathml(r"a < b, $x \le 1$")).startswith("a &lt; b, <math")
    with pytest.raises(ValueError, match="a formula that is no LaTeX"):
        mathml(r"$\frac$")
