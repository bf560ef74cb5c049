"""docs/conformance.md says what the tests of this session have shown, and nothing else.

Runs last, in one process and over the whole folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from simlab.stabilizers import STABILIZERS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
INTRO = """\
# Conformance

Our methods held against the code that others publish, in float64 on ragged batches: value and gradient agree to 1e-9 relative, or the difference is written down and tested.
The last column says which of the two the publication has. The tests write this page and fail when it is stale:

```sh
pip install torch==2.13.0
pip install -r tests/conformance/requirements.txt
pip install --no-deps -r tests/conformance/requirements-nodeps.txt -e .
pytest tests/conformance --write-table
```
"""
SPELLINGS = """\
## Spellings

Options of frameworks whose code does not install here, as a composition (`simlab methods SPEC` says what it does). verl's and TRL's stand above, with the test.
"""
SECOND = """\
## Bias

On how many random MDPs the expected gradient is exactly the true one, by martingale's bench in rational arithmetic; our method has the same expected gradient, also with returns of both signs.
"""


def table(head: tuple, lines: list) -> str:
    """A Markdown table."""
    bars = ["| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *lines)]
    assert all(line.count("|") == len(head) + 1 for line in bars)
    return "\n".join(bars) + "\n"


def page(rows) -> str:
    """The whole page."""
    first = table(
        ("our method", "peer and function", "verdict", "the paper says"),
        [(*pair, *found) for pair, found in rows.pairs.items()],
    )
    spellings = table(("option", "here", "note"), rows.spellings)
    second = table(
        ("martingale", "our method", "lag 0", "lag 1", "lag 4"),
        [(f"`{name}`", *cells) for name, cells in rows.unbiased.items()],
    )
    return "\n".join((INTRO, first, SPELLINGS, spellings, SECOND, second))


def test_every_method_has_a_row(rows):
    """A method of the registry is compared, or stands there as one without code."""
    named = {m for ours, _ in rows.pairs for m in re.findall(r"^`(\w+)[(`]", ours)}
    assert named >= set(STABILIZERS)


def test_the_table_is_what_was_shown(rows, request):
    """The committed page holds exactly the rows of this session; --write-table writes them."""
    if request.config.getoption("--write-table"):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(rows))
    assert PAGE.read_text() == page(rows), (
        "docs/conformance.md is stale, or only a part of the folder ran; "
        "run pytest tests/conformance --write-table"
    )
