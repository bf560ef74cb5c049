"""README and CONTRIBUTING are true: paths exist, commands parse, recipes touch the files they say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from simlab.commands import Verify, parse_compare
from simlab.stabilizers import STABILIZERS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {p.stem: p.read_text() for p in (ROOT / "docs").glob("*.md")}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def tree_paths():
    """Paths of the tree in docs/architecture.md: names by indentation, folders end with a slash."""
    folder = []
    for line in blocks(DOCS["architecture"], "text")[0].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folder = [*folder[:depth], name]
        yield "".join(folder)


def test_every_path_of_the_tree_exists():
    """No line of the printed tree is stale."""
    paths = list(tree_paths())
    assert len(paths) > 20
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_the_tree_is_complete():
    """Every folder of simlab and scaleup stands in the tree."""
    named = set(tree_paths())
    folders = [p.parent for x in ("simlab", "scaleup") for p in (ROOT / x).glob("*/*.py")]
    assert {f"{p.relative_to(ROOT)}/" for p in folders} <= named


def test_links_and_figure_exist():
    """Relative links and images of every Markdown page lead somewhere."""
    for page in [p for where in ("*.md", "docs/*.md", "reports/**/*.md") for p in ROOT.glob(where)]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_commands_parse(tmp_path):
    """Every `simlab compare` and `make` line in the documents is understood."""
    text = README + CONTRIBUTING + "".join(DOCS.values())
    text += "".join(p.read_text() for p in ROOT.glob("reports/**/*.md"))
    lines = [x.split("#")[0].strip() for b in blocks(text, "sh") for x in b.splitlines()]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    seen, known = {"make": 0, "simlab": 0}, {*STABILIZERS}
    for line in filter(None, lines):
        words = line.split()
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[:2] == ["simlab", "verify"]:
            tyro.cli(Verify, args=words[2:])
        elif words[:2] == ["simlab", "compare"]:
            if "--noise-from" in words:
                words[words.index("--noise-from") + 1] = str(ROOT / "tests/data/smollm2_lag8.jsonl")
            for i, option in enumerate(("--method-file", "--advantage-file")):
                if option in words and (ROOT / (given := words[words.index(option) + 1])).exists():
                    words[words.index(option) + 1] = str(ROOT / given)
                elif option in words:
                    own = tmp_path / words[words.index(option) + 1]
                    own.write_text(blocks(CONTRIBUTING, "python")[i])
                    words[words.index(option) + 1] = str(own)
            parse_compare(words[2:])
            for name in STABILIZERS.keys() - known:
                del STABILIZERS[name]
        seen[words[0]] = seen.get(words[0], 0) + 1
    assert seen["make"] >= 2
    assert seen["simlab"] >= 3


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        ("simlab/simulator/train.py", 150),
        ("simlab/stabilizers/*.py", 130),
        ("simlab/**/*.py", 300),
        ("scaleup/**/*.py", 300),
    ],
)
def test_files_stay_small(pattern, limit):
    """The loop is read first and a stabilizer in one sitting."""
    files = [p for p in ROOT.glob(pattern) if p.name != "__init__.py" or limit == 300]
    long = {p.name: n for p in files if (n := len(p.read_text().splitlines())) > limit}
    assert long == {}


@pytest.mark.slow
def test_the_stabilizer_recipe(tmp_path):
    """Walk CONTRIBUTING's recipe in a copy: two new files, one line, and the contract passes."""
    copy = tmp_path / "copy"
    for part in ("simlab", "tests"):
        shutil.copytree(ROOT / part, copy / part)
    shutil.copy(ROOT / "pyproject.toml", copy)
    code, golden = blocks(CONTRIBUTING, "python")[0], blocks(CONTRIBUTING, "json")[0]
    (copy / "simlab/stabilizers/capped.py").write_text(code)
    (copy / "tests/stabilizers/golden/capped.json").write_text(golden)
    registry = copy / "simlab/stabilizers/__init__.py"
    text = registry.read_text().replace("    cispo,", "    capped,\n    cispo,")
    registry.write_text(text.replace('    "cispo":', '    "capped": capped,\n    "cispo":'))
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "capped"]
    where = ("tests/stabilizers", "tests/contract")
    done = subprocess.run([*words, *where], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 4
