"""Arrows go one way, whatever is imported on the way: read off the code, and off what gets loaded."""

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from simlab.study.files import ROOT, imports, sources

PACKAGES = ("simlab", "scaleup", "theory")
LIGHT = {
    f"simlab.{x}" for x in ("core", "stabilizers", "contract", "lag")
}  # what a trainer imports
HEAVY = {"gymnasium", "matplotlib", "polars", "pydantic", "rich", "scipy", "seaborn", "tyro"}


def dotted(path):
    """The name of a module."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def folder(name):
    """What a module belongs to: simlab.core, scaleup.run; a file beside the folders is its own."""
    return ".".join(name.split(".")[:2])


PATHS = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
MODULES = {dotted(path): path for path in PATHS if "site" not in path.parts}


@pytest.mark.parametrize("level", [str, folder], ids=["modules", "folders"])
def test_no_circle(level):
    """No module, and no folder, is behind itself."""
    graph = {level(name): set() for name in MODULES}
    for name, path in MODULES.items():
        straight = {x if x in MODULES else x.rpartition(".")[0] for x in imports(path)}
        graph[level(name)] |= {level(x) for x in straight & MODULES.keys()} - {level(name)}
    graph |= {package: set() for package in PACKAGES}  # nothing is imported for its __init__
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("name", sorted({folder(name) for name in MODULES}))
def test_a_folder_reaches_only_what_it_may(name):
    """At any depth. Light folders: each other. Study, audit and engines: neither toy nor verify. Theory:
    itself. Nobody: the laboratory of the engines."""
    for module in (x for x in MODULES if folder(x) == name):
        behind = {folder(dotted(path)) for path in sources(module)} - {name, *PACKAGES}
        assert name not in LIGHT or behind <= LIGHT, module
        if name in ("simlab.study", "simlab.audit") or name.startswith("scaleup"):
            assert not behind & {"simlab.simulator", "simlab.verify", "simlab.commands"}, module
        assert not name.startswith("theory") or all(x.startswith("theory") for x in behind), module
        assert "scaleup.engines_report" not in behind, module


def test_light_folders_load_torch_and_nothing_heavier():
    """In a new process that imports all of their modules, and the audit of a batch in a training loop."""
    names = [name for name in MODULES if folder(name) in LIGHT] + ["simlab.audit.audit"]
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split())
    assert "torch" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("text", ["from {0}.train import x", "import {0}.train", "from {0} import train"])  # fmt: skip
def test_a_planted_arrow_is_seen(tmp_path, text):
    """In every spelling, wherever it stands in a file."""
    (tmp_path / "bad.py").write_text(f"def f():\n    {text.format('simlab.simulator')}\n")
    assert any(x.startswith("simlab.simulator.train") for x in imports(tmp_path / "bad.py"))
