"""The commands with and without the packages of an extra, and `import simlab`, in new processes."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from simlab.study.command_line import UserError, run

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMPARE = sorted(x.partition(">")[0].replace("-", "_") for x in EXTRAS["compare"])
BASE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {COMPARE}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python(code, *words, **streams):
    """What Python says to this code, run beside the packages."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, text=True, **streams)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("simlab compare --quick", "compare"),
        ("simlab methods", "compare"),
        ("simlab verify", "compare"),
        ("scaleup plan tiny_cpu", "engines"),
        ("scaleup run tiny_cpu", "engines"),
        ("scaleup compare tiny_cpu", "engines"),
    ],
)
def test_a_command_without_its_extra_says_which_to_install(words, extra):
    """One sentence and exit code 2 where a base install lacks the packages."""
    program, command, *_ = words.split()
    done = python(f"{BASE}from {program}.__main__ import main; main()", *words.split()[1:])
    wanted = f"{program}: {command} needs simlab[{extra}]: pip install 'simlab[{extra}]' ("
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(wanted)
    assert done.stderr.endswith(" is not installed)\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_base_install_runs_the_losses():
    """torch and numpy are enough for every stabilizer, the contract and the lag regimes."""
    code = """
import simlab
from simlab.contract.promises import check
from simlab.lag import LAGS
from simlab.stabilizers import NAMES
check(simlab.bind("sat"))
print(len(NAMES), len(LAGS))
"""
    done = python(BASE + code)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2


@pytest.mark.parametrize("program", ["simlab", "scaleup"])
def test_help_and_import_load_neither_torch_nor_an_extra(program):
    """`--help` and `import simlab` take a fraction of a second; no command at all is an error."""
    code = f"import sys, simlab\nfrom {program}.__main__ import main\ntry: main()\nfinally: print(*sys.modules)"
    for words, status in ((["--help"], 0), ([], 2)):
        done = python(code, *words)
        assert done.returncode == status, done.stderr
        assert done.stdout.startswith(f"usage: {program} {{")
        assert not {"torch", "numpy", *COMPARE} & set(done.stdout.split())


def test_version_is_said_at_once():
    """Without torch."""
    done = python("import sys\nfrom simlab.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)", "--version")  # fmt: skip
    assert (done.returncode, done.stdout.split()[0], done.stdout.split()[-1]) == (0, "simlab", "False")  # fmt: skip


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_every_command_with_one_sentence(number, code):
    """Ctrl-C and SIGTERM, wherever in the command."""
    go = f"lambda words: os.kill(os.getpid(), signal.{number}) or time.sleep(60)"
    said = f"import os, signal, time\nfrom simlab.study.command_line import run\nrun('toy', ('go',), lambda word: {go}, 'compare', ['go'])"
    done = python(said)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "\ntoy: stopped\n")


def toy(problem):
    """A program `toy` whose command `go` meets this problem."""

    def go(words):
        problem()

    return lambda word: run("toy", ("go",), {"go": go}.__getitem__, "compare", [word])


def fail(error):
    """A function that raises this error."""

    def problem():
        raise error

    return problem


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (fail(ValueError("x is 3")), "toy: x is 3\n"),
        (fail(UserError("the run stands")), "toy: the run stands\n"),
        (lambda: import_module("absent.part"), "'simlab[compare]' (absent is not installed)\n"),
    ],
)
def test_problems_are_a_sentence(capsys, problem, sentence):
    """Exit code 2; a package that is missed late, in the middle of a command, is named too."""
    with pytest.raises(SystemExit) as stopped:
        toy(problem)("go")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(sentence)


def test_an_unknown_command_is_a_sentence(capsys):
    """It names the commands."""
    with pytest.raises(SystemExit) as stopped:
        toy(fail(KeyError()))("come")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "toy: no command 'come'; there are go\n"


@pytest.mark.parametrize("problem", [lambda: import_module("simlab.absent"), fail(KeyError(1))])
def test_defects_of_our_own_are_no_sentence(problem):
    """A wrong import of our own module, or any other error, keeps its traceback."""
    with pytest.raises((ModuleNotFoundError, KeyError)):
        toy(problem)("go")


PRINTS = """
import sys
from simlab.study.command_line import run
def go(words):
    print("said")
    if words == ["alarm"]: raise SystemExit(1)
    if words == ["wrong"]: raise ValueError("x is 3")
run("toy", ("go",), {"go": go}.__getitem__, "compare", sys.argv[1:])
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["go"], ["go", "alarm"], ["--help"], []])
def test_a_full_disk_behind_stdout_is_a_sentence(words, unbuffered):
    """Whatever is printed, by whichever command, and however it ends."""
    with Path("/dev/full").open("w") as disk:
        done = python(
            PRINTS, *words, stdout=disk, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}
        )
    said = "toy: output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_a_full_disk_behind_stderr_keeps_the_exit_code(debug):
    """A refusal that nobody can be told is still exit code 2."""
    with Path("/dev/full").open("w") as disk:
        done = python(PRINTS, "come", *debug, stderr=disk)
        assert (done.returncode, done.stdout) == (2, "")
        done = python(PRINTS, "go", "wrong", stderr=disk)
    assert (done.returncode, done.stdout) == (2, "said\n")


def test_user_errors():
    """Settings and runs fail with sentences."""
    from simlab.study.settings import RunError
    from simlab.study.strict import ConfigError

    assert issubclass(ConfigError, UserError)
    assert issubclass(RunError, UserError)
