"""Figures of reports have one style, which neither reads nor changes the user's own."""

import os
import subprocess
import sys

import matplotlib
import pytest
from matplotlib.figure import Figure

from simlab.study.page import embed


def draw():
    """A figure with a title that LaTeX would refuse."""
    fig = Figure(figsize=(2, 1.5))
    fig.subplots().set_title("50 % of d_bar")
    return fig


def test_a_user_s_style_is_neither_used_nor_changed(tmp_path):
    """The same bytes with LaTeX text and large letters; afterwards both are as the user set them."""
    own = {"text.usetex": True, "font.size": 30, "axes.grid": True, "svg.fonttype": "path"}
    pages = []
    for name, settings in (("plain", {}), ("own", own)):
        (tmp_path / name).mkdir()
        with matplotlib.rc_context(settings):
            before = dict(matplotlib.rcParams)
            pages.append(embed(draw, tmp_path / name, "x", "", "")["png"])
            assert dict(matplotlib.rcParams) == before
    assert pages[0] == pages[1]
    assert (tmp_path / "plain/x.svg").read_bytes() == (tmp_path / "own/x.svg").read_bytes()


@pytest.mark.parametrize("backend", [None, "TkAgg"])
@pytest.mark.slow
def test_c099_a_page_without_a_display(tmp_path, backend):
    """A dead forwarded DISPLAY, with and without a backend that would need one: the files are written."""
    code = f"""
from pathlib import Path
from matplotlib.figure import Figure
from simlab.study.page import embed
embed(Figure, Path({str(tmp_path)!r}), "x", "", "")
"""
    own = {name: x for name, x in os.environ.items() if name != "MPLBACKEND"}
    own |= {"DISPLAY": "localhost:64.0"} | ({"MPLBACKEND": backend} if backend else {})
    subprocess.run([sys.executable, "-c", code], check=True, env=own)
    assert {path.name for path in tmp_path.iterdir()} == {"x.png", "x.svg", "x.pdf"}


@pytest.mark.parametrize("module", ["simlab.simulator.report", "simlab.verify.run"])
@pytest.mark.slow
def test_an_import_sets_nothing(module):
    """The backend that a notebook chose, and every other setting."""
    code = f"""
import matplotlib
matplotlib.use("svg")
before = dict(matplotlib.rcParams)
import {module}
assert dict(matplotlib.rcParams) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
