"""The weight that is drawn is the one of the formula, and the picture on disk has every method."""

import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from simlab import bind
from simlab.commands import run_methods
from simlab.stabilizers import NAMES
from simlab.tools.weights import map_of, weight

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "d", "A", "w"),
    [
        ("ppo", 0.1, 1.0, math.exp(0.1)),
        ("ppo", 0.2, 1.0, 0.0),
        ("ppo", 0.2, -1.0, math.exp(0.2)),
        ("ppo", -0.3, -1.0, 0.0),
        ("none", 0.9, -1.0, 1.0),
        ("cispo", 0.9, 1.0, 1.2),
        ("dppo", 0.9, 1.0, 0.0),
    ],
)
def test_weights_are_those_of_the_formula(name, d, A, w):
    """Worked out by hand."""
    assert weight(bind(name), torch.tensor([d]).double(), A).item() == pytest.approx(w)


def test_the_map_has_a_panel_for_every_name():
    """Three here; a method without a published argument takes part."""
    fig = map_of(["ppo", "spo_scaled", "sat"])
    assert [ax.get_title() for ax in fig.axes if ax.get_title()] == ["ppo", "spo_scaled", "sat"]
    drawn = Image.open(ROOT / "docs/methods_weights.png").text["Description"]
    assert drawn == ", ".join(NAMES), "draw it again, as docs/weights.md says"


def test_the_command_draws_one_method(tmp_path, capsys):
    """A composition too; the same bytes again; another suffix is a sentence."""
    out = tmp_path / "w.svg"
    run_methods(["gspo+tis", "--plot", str(out)])
    first = out.read_bytes()
    run_methods(["gspo+tis", "--plot", str(out)])
    assert out.read_bytes() == first
    assert "gspo+tis" in first.decode()
    with pytest.raises(ValueError, match=r"must end in .png, .svg, .pdf"):
        run_methods(["ppo", "--plot", str(tmp_path / "w.gif")])
