"""Sources behind a module or a user's file, and files that are whole or absent."""

import os

import pytest

from simlab.study.arms import Arm
from simlab.study.files import ROOT, local_sources, sources, write


@pytest.fixture
def method(tmp_path, monkeypatch):
    """A method file with helpers in every spelling, beside it and in another folder of sys.path."""
    files = {
        "mine/soft.py": "import json\nimport torch\nfrom knob import x\nimport tools.dial\n"
        "from simlab.core.tokens import nothing\ndef f():\n    from far import y\n",
        "mine/knob.py": "# coding: latin-1\nx = '\xe9'\n",
        "mine/tools/__init__.py": "",
        "mine/tools/dial.py": "from . import one\nfrom .two import z\nfrom ..tools import three\n",
        "mine/tools/one.py": "",
        "mine/tools/two.py": "",
        "mine/tools/three.py": "import soft\n",
        "mine/tools/unused.py": "",
        "mine/unused.py": "",
        "far/far.py": "import torn\n",
        "far/torn.py": "def (",
        "far/site-packages/installed.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="latin-1")
    for name in ("far", "far/site-packages"):
        monkeypatch.syspath_prepend(tmp_path / name)
    return tmp_path / "mine" / "soft.py"


def test_a_method_file_stands_on_its_own_imports(method):
    """At any depth, relative or not; nothing installed, nothing of this project, nothing unused."""
    found = {str(path.relative_to(method.parents[1])) for path in local_sources(method)}
    helpers = {"mine/knob.py", "far/far.py", "far/torn.py", "mine/soft.py"}
    assert found == helpers | {
        f"mine/tools/{name}.py" for name in ("__init__", "dial", "one", "two", "three")
    }


def test_an_edit_of_any_of_them_changes_the_code(method):
    """Of a helper's helper too; of a file that is not imported, not."""
    arm = Arm("soft", "soft", file=str(method))
    before, folder = arm.code, method.parents[1]
    for path in local_sources(method):
        text = path.read_bytes()
        path.write_bytes(text + b"# edited\n")
        assert arm.code != before, path
        path.write_bytes(text)
        assert arm.code == before
    (folder / "mine" / "unused.py").write_text("x = 1")
    assert arm.code == before
    assert Arm("ppo", "ppo").code is None


def test_sources_of_a_module_are_the_project_s():
    """What the simulator stands on, and nothing else."""
    found = sources("simlab.simulator.train")
    assert ROOT / "simlab/stabilizers/ppo.py" in found
    assert ROOT / "simlab/simulator/report.py" not in found
    assert all(path.is_relative_to(ROOT / "simlab") for path in found)


def test_a_temporary_name_is_of_the_process(tmp_path):
    """Two processes that write one file do not meet in its part, and no part is left."""
    seen = []
    write(tmp_path / "x.txt", lambda part: (seen.append(part.name), part.write_text("a")))
    assert seen == [f"x.txt.{os.getpid()}.part"]
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "x.txt", lambda part: (part.write_text("b"), 1 / 0))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"x.txt": "a"}


def test_the_library_is_nobody_s_own(tmp_path):
    """A file that imports the standard library stands alone, wherever that library lies."""
    (tmp_path / "x.py").write_text("import json, os.path, email.mime.text\n")
    assert local_sources(tmp_path / "x.py") == [(tmp_path / "x.py").resolve()]
