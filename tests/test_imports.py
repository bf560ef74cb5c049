"""Arrows go one way, and the core loads torch and nothing heavier."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A module imports from its own row and the rows above it, never from below.
LAYERS = [
    [
        "arguments",
        "tokens",
        "quantile",
        "batch_stats",
        "aggregate",
        "stabilizers",
        "advantages",
        "kl",
        "logits",
        "across_steps",
        "batches",
        "contract",
        "fused",
    ],  # the core, shared with a cluster
    [
        "draws",
        "lag",
        "policies",
        "tasks",
        "noise",
        "exact",
        "sample",
        "intervals",
        "specs",
    ],  # the world
    ["config"],
    ["pretrain", "measure", "train", "env", "summary"],
    ["experiments"],
    [
        "methods",
        "token_log",
        "token_rows",
        "page",
        "pool",
        "figures",
        "report",
        "compare",
        "bias",
        "theory_figures",
        "verify",
    ],
    ["__main__"],
]
RANK = {module: rank for rank, row in enumerate(LAYERS) for module in row}


def imported(path):
    """simlab modules that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("simlab"):
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from names
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("simlab."))


def violations(files):
    """(importer, imported) pairs that point upward or to a module that no layer names."""
    for module, path in files:
        for name in imported(path):
            if name not in RANK or RANK[name] > RANK.get(module, -1):
                yield module, name


def sources():
    for path in sorted((ROOT / "simlab").rglob("*.py")):
        module = path.relative_to(ROOT / "simlab").parts[0].removesuffix(".py")
        if module != "__init__":
            yield module, path


def test_every_module_has_a_layer():
    """A new top-level module must be placed."""
    assert {module for module, _ in sources()} == set(RANK)


def test_nothing_imports_upward():
    """No file of simlab imports from a layer below its own."""
    assert list(violations(sources())) == []


def roots(path):
    """Top-level packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_theory_knows_no_simulator():
    """theory/ imports numpy, scipy (for the search) and itself; only reports on it import theory."""
    allowed = {"numpy", "scipy", "theory", *sys.stdlib_module_names}
    for path in (ROOT / "theory").rglob("*.py"):
        assert set(roots(path)) <= allowed, path.name
    users = {path.name for path in (ROOT / "simlab").rglob("*.py") if "theory" in roots(path)}
    assert users <= {"bias.py", "theory_figures.py", "verify.py"}


ENGINES = ["checkpoint", "checksums", "launch", "local", "model", "plan", "replay", "responses", "rollout", "server", "tiny", "train", "weights"]  # fmt: skip


def test_scaleup_stands_on_the_core():
    """Engines import the core alone; their pipeline the lag regimes, settings and pages too. Nobody
    imports scaleup, and the pipeline knows neither the world's training loop nor its reports."""
    outer = {
        "config",
        "figures",
        "intervals",
        "lag",
        "page",
        "specs",
        "summary",
        "token_log",
        "token_rows",
    }
    for path in (ROOT / "scaleup").rglob("*.py"):
        engine = path.stem in ENGINES or path.parent.name == "cpu"
        assert set(imported(path)) <= {*LAYERS[0]} | (set() if engine else outer), path.name
    for folder in ("simlab", "theory"):
        assert all("scaleup" not in roots(p) for p in (ROOT / folder).rglob("*.py"))


def test_a_planted_breach_is_found(tmp_path):
    """The check can fail: a stabilizer that imports the training loop, in three spellings."""
    for text in (
        "from simlab.train import train",
        "import simlab.train",
        "from simlab import train",
    ):
        path = tmp_path / "bad.py"
        path.write_text(f"def f():\n    {text}\n")
        assert list(violations([("stabilizers", path)])) == [("stabilizers", "train")]


def test_core_loads_torch_and_nothing_heavier():
    """Importing the core brings none of the other dependencies of the project."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    light = {"torch", "numpy", "jinja2"}  # torch itself may import the last two
    heavy = {name.split(">")[0].replace("-", "_") for name in names} - light
    core = ", ".join(f"simlab.{module}" for module in LAYERS[0])
    code = f"import sys, {core}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "torch" in loaded
    assert heavy & set(loaded) == set()
