"""The option that writes the table, and the rows that the tests of one session collect."""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    """`--write-table` writes docs/conformance.md instead of comparing with it."""
    parser.addoption("--write-table", action="store_true", help="write docs/conformance.md")


class Rows:
    """What a test has shown, in the order of the tests."""

    def __init__(self):
        self.pairs: dict[tuple[str, str], tuple[str, str]] = {}  # (ours, peer): (verdict, paper)
        self.spellings: list[tuple[str, str, str]] = []  # option of a framework, ours, note
        self.unbiased: dict[str, list[str]] = {}  # estimator: cells

    def add(self, ours: str, peer: str, verdict: str, paper: str) -> None:
        """One row; a pair may be shown once."""
        assert (ours, peer) not in self.pairs, f"{ours} and {peer} are compared twice"
        self.pairs[ours, peer] = (verdict, paper)


@pytest.fixture(scope="session")
def rows():
    """The rows of this session."""
    return Rows()
