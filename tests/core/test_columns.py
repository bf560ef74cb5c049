"""docs/results.md names every logged column, and every diagnostic of the registry."""

from pathlib import Path

import pytest
from batches import ragged

from simlab.core.arguments import required
from simlab.core.columns import LOGGED, METHOD, SECTIONS, markdown
from simlab.stabilizers import NAMES, STABILIZERS, bind

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def test_the_page_is_the_code():
    """`python -m simlab.core.columns > docs/results.md` was run."""
    assert PAGE.read_text() == markdown()


def test_every_name_stands_once():
    """In one section, with a meaning."""
    names = [name for columns, _ in SECTIONS.values() for name in columns]
    assert len(set(names)) == len(names)
    assert all(x.meaning for columns, _ in SECTIONS.values() for x in columns.values())


@pytest.mark.parametrize("name", NAMES)
def test_diagnostics_of_methods_are_named(name):
    """With a meaning, and none is a column that every run has."""
    module = STABILIZERS[name]
    bound = bind(name, **dict.fromkeys(required(module.surrogate), 0.5))
    found = bound(ragged(1)).diagnostics.keys()
    assert found <= METHOD.keys()
    assert not found & LOGGED
