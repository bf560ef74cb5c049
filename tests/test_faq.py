"""docs/faq.md, docs/glossary.md and the site: what they show is what the code does, and every page is reachable."""

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_answers_are_what_the_code_says():
    """Every line after >>> of the page."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    done = doctest.testfile(str(ROOT / "docs/faq.md"), module_relative=False, optionflags=flags)
    assert done.attempted > 10
    assert done.failed == 0


def test_the_site_has_every_page():
    """Those of docs/, and no other."""
    named = re.findall(r"  - .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == [page.name for page in PAGES]


def test_links_between_pages_exist():
    """Pages, figures and anchors' files."""
    for page in PAGES:
        for target in re.findall(r"\]\(([\w/.]+\.(?:md|png|py))\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
