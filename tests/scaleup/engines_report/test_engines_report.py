"""The committed page about the engines is made of its table."""

import csv
from pathlib import Path

import pytest

from scaleup.engines_report.__main__ import OUT
from scaleup.engines_report.page import figure, page
from scaleup.engines_report.rows import Row

FOLDER = Path(__file__).parents[3] / OUT


@pytest.fixture(scope="module")
def rows():
    """The committed numbers."""
    with (FOLDER / "numbers.csv").open() as file:
        return [
            Row(x["part"], x["case"], int(x["seed"]), x["name"], float(x["value"]))
            for x in csv.DictReader(file)
        ]


def test_the_page_is_that_of_the_numbers(rows):
    """Every line but the one with versions is written again from numbers.csv."""
    ours, held = page(rows, {}).splitlines(), (FOLDER / "README.md").read_text().splitlines()
    assert len(ours) == len(held) > 50
    assert [a[:30] for a, b in zip(ours, held, strict=True) if a != b] == [ours[6][:30]]
    assert ours[6].startswith("Written by this command")


def test_the_figure_shows_all_lines(rows):
    """Four survival functions, none above 1 and none that rises."""
    lines = figure(rows).axes[0].lines
    assert len(lines) == 4
    for line in lines:
        y = [x for x in line.get_ydata() if x == x]
        assert y == sorted(y, reverse=True)
        assert max(y) <= 1
