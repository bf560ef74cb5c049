"""`simlab conform` says equal where it is, and finds the smallest token that is not."""

import re
from pathlib import Path

import pytest

from simlab import bind
from simlab.stabilizers import STABILIZERS
from simlab.tools.conform import conform, run_conform

PAGE = (Path(__file__).parents[2] / "docs/plug_in.md").read_text()
PORT = re.search(r"```python\n(# my_loss.py.*?)```", PAGE, re.DOTALL)[1]


def ended(words):
    """The exit code of the command."""
    try:
        run_conform(words)
    except SystemExit as stop:
        return stop.code
    return 0


def test_a_port_of_ppo_is_ppo(tmp_path, capsys):
    """The loss of docs/plug_in.md, one number a token or their mean."""
    path = tmp_path / "my_loss.py"
    for text in (PORT, PORT.replace("return each", "return each[mask].mean()")):
        path.write_text(text)
        assert ended([str(path), "--against", "ppo"]) == 0
        assert "are equal on" in capsys.readouterr().out


def test_a_difference_is_shown_on_one_token(tmp_path, capsys):
    """The radius of DAPO: a token between 1.2 and 1.28, with what each makes of it."""
    path = tmp_path / "my_loss.py"
    path.write_text(PORT.replace("1.2)", "1.28)"))
    assert ended([str(path), "--against", "ppo"]) == 1
    head, names, *rows = capsys.readouterr().out.splitlines()[2:]
    assert head.endswith("1 token, 1 response")
    token = dict(zip(re.split(r"\s{2,}", names.strip()), rows[0].split(), strict=True))
    assert len(rows) == 1
    assert 1.2 < float(token["pi"]) / float(token["mu"]) < 1.28 or float(token["d"]) > 0.24
    assert float(token["gradient theirs"]) == 0 != float(token["gradient mine"])
    assert ended([str(path), "--against", "ppo:eps_high=0.28"]) == 0


@pytest.mark.parametrize(("mine", "theirs"), [("ppo+contract", "sat"), ("pg", "ppo")])
def test_methods_are_compared_too(mine, theirs):
    """Compositions that are methods by another name, or not."""
    assert ended([mine, "--against", theirs]) == (0 if mine.startswith("ppo") else 1)


def test_a_whole_batch_rule_needs_more_than_a_token():
    """SAT is PPO on few tokens: a quantile at 0.9 that lies below the largest |d| takes ten of them."""
    found, _ = conform(bind("sat"), bind("ppo"), 1e-8)
    assert len(found.batch.logp) == 10


@pytest.mark.parametrize(
    ("text", "against", "says"),
    [
        ("x = 1", "ppo", "neither surrogate"),
        (PORT, "icepop", "reads logp_prox, which a loss of four tensors is not given"),
        ("def loss(a, b, c, d):\n    return 1", "ppo", "it must return a tensor of one number"),
        ("def loss(a, b, c, d):\n    return a @ b", "ppo", "RuntimeError"),
        (PORT, "nothing", "no stabilizer 'nothing'"),
        (None, "ppo", "there is no such file"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(tmp_path, text, against, says):
    """And names what is wrong."""
    path = tmp_path / "odd_loss.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says):
        run_conform([str(path), "--against", against])
    assert "odd_loss" not in STABILIZERS
