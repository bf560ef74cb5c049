"""What `simlab new` writes keeps the promises; nothing is overwritten."""

import pytest

from simlab import bind
from simlab.contract.advantages import check as check_advantage
from simlab.contract.advantages import load as load_advantage
from simlab.contract.promises import check
from simlab.stabilizers import STABILIZERS, load
from simlab.tools.skeleton import run_new


def test_a_new_method_keeps_the_promises(tmp_path, capsys):
    """As it is written, its argument checked."""
    path = tmp_path / "fresh_rule.py"
    run_new([str(path)])
    assert f"simlab methods {path}" in capsys.readouterr().out
    try:
        check(bind(load(path)))
        with pytest.raises(ValueError, match="width must lie in"):
            bind("fresh_rule", width=-1.0)
    finally:
        STABILIZERS.pop("fresh_rule", None)


def test_a_new_advantage_keeps_the_promises(tmp_path):
    """As it is written."""
    path = tmp_path / "fresh_advantage.py"
    run_new([str(path), "--kind", "advantage"])
    check_advantage(path, load_advantage(path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ppo.py", "there is a stabilizer ppo already"),
        ("my-rule.py", "must be a word and .py"),
        ("rule.txt", "must be a word and .py"),
        ("there.py", "is left alone"),
    ],
)
def test_a_name_that_cannot_be_is_a_sentence(tmp_path, name, says):
    """And an existing file keeps its content."""
    (tmp_path / "there.py").write_text("mine")
    with pytest.raises(ValueError, match=says):
        run_new([str(tmp_path / name)])
    assert [x.name for x in tmp_path.iterdir()] == ["there.py"]
    assert (tmp_path / "there.py").read_text() == "mine"
