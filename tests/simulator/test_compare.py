"""The main command: run folder, resume, byte-identical reruns, and one sentence for every mistake."""

import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from urllib.parse import quote

import polars as pl
import pytest

import simlab.simulator.compare
import simlab.simulator.pool
import simlab.simulator.report
from simlab.__main__ import main
from simlab.commands import parse_compare
from simlab.contract.cards import GUESS
from simlab.core.aggregate import AGGREGATIONS, mean
from simlab.core.arguments import required
from simlab.core.columns import LOGGED
from simlab.core.tokens import nothing
from simlab.simulator.config import Config
from simlab.simulator.experiments import e1
from simlab.simulator.figures import FIGURES
from simlab.simulator.report import GUIDES
from simlab.simulator.summary import runs, summarize
from simlab.stabilizers import STABILIZERS, bind
from simlab.token_log.files import read, steps
from simlab.token_log.rows import to_batch

LOG = Path(__file__).parents[1] / "data" / "smollm2_lag8.jsonl"
TINY = [
    "--prompts",
    "2",
    "--horizon",
    "4",
    "--vocab",
    "4",
    "--answers",
    "4",
    "--steps",
    "8",
    "--log-every",
    "2",
    "--seeds",
    "3",
    "--lags",
    "1",
    "2",
]
ARMS = ["--methods", "ppo", "sat", "placebo-draws=ppo@1", "--noise", "gaussian:scale=0.05"]
ARMS += ["--draws", "2", "--healthy-lag", "1"]


def run(out, *words, workers=1):
    main(["compare", *TINY, *ARMS, "--out", str(out), "--workers", str(workers), *words])


def contents(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module", autouse=True)
def two_figures():
    """Drawing takes most of the time of a tiny run: two figures here, all of them in one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            simlab.simulator.report,
            "FIGURES",
            {name: FIGURES[name] for name in ("risk", "bound")},
        )
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory, two_figures):
    """A finished run in one process."""
    out = tmp_path_factory.mktemp("run") / "one"
    run(out)
    return out


def test_run_folder(folder):
    """Every promised file is there; rows carry config, commit, seed and version."""
    assert {p.name for p in folder.iterdir()} == {
        "config.toml", "results.parquet", "runs.parquet", "summary.csv", "report.html", "figures",
        "cells", ".lock",
    }  # fmt: skip
    rows = pl.read_parquet(folder / "results.parquet")
    assert {"experiment", "version", "commit", "config", "arm", "lag", "seed", "step"} <= set(
        rows.columns
    )
    bound = [bind(k, **dict.fromkeys(required(m.surrogate), GUESS)) for k, m in STABILIZERS.items()]
    shown = {name for method in bound for name in method(nothing(0)).diagnostics}
    assert set(rows.columns) - shown <= LOGGED | {"q"}
    assert not shown & LOGGED
    assert len(rows) == 3 * 2 * 3 * 5  # arms, lags, seeds, logged steps 0 2 4 6 8
    assert rows["experiment"].unique().to_list() == [f"e1-v{e1.VERSION}-changed"]
    pictures = {p.name for p in (folder / "figures").iterdir()}
    kinds = ("png", "svg", "pdf")
    assert pictures == {f"{name}.{kind}" for name in ("risk", "bound") for kind in kinds}
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    stored = tomllib.loads((folder / "config.toml").read_text())
    assert stored.pop("experiment") == "e1"
    assert Config(**stored) == parse_compare([*TINY, *ARMS]).settings


def test_every_figure_is_drawn_and_has_a_guide(folder):
    """All figures draw from the rows of a run, and each has its title and reading guide."""
    rows = pl.read_parquet(folder / "results.parquet")
    config = parse_compare([*TINY, *ARMS]).settings
    per_run = runs(config, rows)
    table = summarize(config, per_run)
    for name, draw in FIGURES.items():
        assert draw(config, rows, per_run, table).axes, name
    assert set(GUIDES) == set(FIGURES)


@pytest.mark.slow
def test_rerun_with_two_workers_is_byte_identical(folder, tmp_path):
    """Neither the number of processes, nor a token log, nor a second run changes a byte of any file."""
    run(tmp_path / "two", "--token-log", str(tmp_path / "log"), workers=2)
    assert contents(tmp_path / "two") == contents(folder)
    names = {f"{x}_lag_{n}_seeds_0-2" for x in ("ppo", "sat", "placebo-draws") for n in (1, 2)}
    assert {path.name for path in (tmp_path / "log").iterdir()} == names
    before = contents(folder)
    run(folder)
    assert contents(folder) == before


@pytest.mark.slow
def test_stopped_run_resumes(folder, tmp_path, monkeypatch):
    """Interrupted after two cells, a run keeps them, trains only the rest, and ends the same."""
    trained = []
    real = simlab.simulator.pool.train

    def train(cell, log):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(cell)
        return real(cell, log)

    monkeypatch.setattr(simlab.simulator.pool, "train", train)
    options = parse_compare([*TINY, *ARMS])
    with pytest.raises(KeyboardInterrupt):
        simlab.simulator.compare.compare(options.settings, "e1", tmp_path / "run", workers=1)
    assert len(list((tmp_path / "run" / "cells").iterdir())) == 2
    assert not (tmp_path / "run" / "results.parquet").exists()
    again = []
    monkeypatch.setattr(
        simlab.simulator.pool, "train", lambda cell, log: again.append(cell) or real(cell)
    )
    run(tmp_path / "run")
    assert len(again) == 4
    assert not set(map(repr, again)) & set(map(repr, trained))
    assert contents(tmp_path / "run") == contents(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_real_process(tmp_path, number, code):
    """Ctrl-C or SIGTERM, with a dead display and a GUI backend in the environment: cells are kept."""
    words = [
        sys.executable,
        "-m",
        "simlab",
        "compare",
        *TINY,
        *ARMS,
        "--steps",
        "80",
        "--out",
        str(tmp_path / "x"),
    ]
    env = os.environ | {"MPLBACKEND": "TkAgg", "DISPLAY": "localhost:64.0"}
    process = subprocess.Popen(
        [*words, "--workers", "2"], env=env, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("x/cells/*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "the same command resumes" in err
    assert "Traceback" not in err
    kept = list(tmp_path.glob("x/cells/*"))
    assert kept
    assert all(p.suffix == ".parquet" for p in kept)


@pytest.mark.slow
def test_a_folder_grows_but_is_not_overwritten(folder, tmp_path, capsys):
    """More lags, seeds or methods reuse the cells; another learning rate is refused."""
    out = tmp_path / "grown"
    run(out)
    cells = set((out / "cells").iterdir())
    run(out, "--lags", "1", "2", "3")
    assert cells < set((out / "cells").iterdir())
    assert len(set((out / "cells").iterdir()) - cells) == 3
    assert pl.read_parquet(out / "results.parquet")["lag"].unique().sort().to_list() == [
        "1",
        "2",
        "3",
    ]
    before = contents(out)
    with pytest.raises(SystemExit) as stop:
        run(out, "--lr", "0.1")
    assert stop.value.code == 2
    said = f"{out / 'config.toml'}: training.lr is 16.0 in the run of this folder and 0.1 in this"
    assert said in capsys.readouterr().err
    assert contents(out) == before


@pytest.mark.slow
def test_replayed_noise_from_the_real_log(tmp_path, capsys):
    """--noise-from runs, replaces --noise, shows as implementation part of d; page and stderr have its notes."""
    first, *rest = map(json.loads, LOG.read_text().splitlines())
    for name in ("trainer_logprobs_before", "rollout_logprobs"):
        first[name][0] = 0.0
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in (first, *rest)))
    run(tmp_path / "r", "--noise-from", str(log))
    rows = pl.read_parquet(tmp_path / "r" / "results.parquet")
    assert rows["d_engine"].mean() > 0.005
    note = f"{log}: 1 tokens have probability 1 to rounding: no log-odds, left out"
    assert f"simlab: {note}" in capsys.readouterr().err
    assert f'<li class="note">{note}</li>' in (tmp_path / "r" / "report.html").read_text()


def test_precedence(tmp_path):
    """Options over the TOML file over --quick over the experiment."""
    file = tmp_path / "my.toml"
    file.write_text('seeds = 5\nlags = [3]\n[training]\nlr = 0.5\n[world]\ntask = "needle"\n')
    chosen = parse_compare(["--experiment", "e2", "--quick", "--config", str(file), "--lags", "4"])
    settings = chosen.settings
    assert settings.lags == ("4",)
    assert settings.seeds == 5
    assert settings.training.lr == 0.5
    assert settings.training.steps == 60
    assert settings.training.optimizer == "adam"
    assert settings.world.task == "needle"
    file.write_text('experiment = "e2"\nlags = 24\n[training]\ngrad_clip = inf\n')
    chosen = parse_compare(["--config", str(file)])
    assert chosen.experiment == "e2"
    assert chosen.settings.lags == ("24",)
    assert chosen.settings.training.grad_clip == float("inf")
    file.write_text(f'noise_from = "{LOG}"\n')
    assert parse_compare(["--config", str(file)]).settings.noise_from == LOG
    chosen = parse_compare(["--config", str(file), "--noise", "gaussian"]).settings
    assert (chosen.noise, chosen.noise_from) == (("gaussian",), None)


def bad_file(text):
    def make(tmp_path):
        path = tmp_path / "bad.toml"
        path.write_text(text)
        return ["--config", str(path)]

    return make


def bad_log(text, name="bad.jsonl"):
    def make(tmp_path):
        path = tmp_path / name
        path.write_text(text)
        return ["--noise-from", str(path)]

    return make


MISTAKES = [
    (["--learning-rate", "1"], "Unrecognized"),
    (["--lags", "two"], "no lag regime 'two'; there are fully_async, interval, sync"),
    (["--lr", "-1"], "lr: Input should be greater than or equal to 0"),
    (["--lr", "nan"], "lr: Input should be a finite number"),
    (["--lags", "interval:n=0"], "interval lag needs a whole n >= 1, got 0"),
    (["--lags", "fully_async:max_age=-1"], "fully_async lag needs a whole max_age >= 0, got -1"),
    (["--lags", "fully_async"], "lag 'fully_async': missing a required argument: 'max_age'"),
    (["--lags", "8", "interval:n=8"], "two lags are the same regime (8, interval:n=8)"),
    (["--lags", "sync:n=1"], "lag 'sync:n=1': got an unexpected keyword argument 'n'"),
    (["--seeds", "1"], "seeds: Input should be greater than or equal to 2"),
    (["--steps", "0"], "steps"),
    (["--optimizer", "lion"], "--optimizer"),
    (["--experiment", "e9"], "e9"),
    (["--task", "helth"], "no task 'helth'; there are health"),
    (["--task", "tree", "--vocab", "8", "--horizon", "10"], "at most 4,194,304 are allowed"),
    (
        ["--policy", "tabular", "--noise", "router"],
        "noise router needs a policy with a router (moe), not tabular",
    ),
    (["--methods", "ppo", "satt"], "no stabilizer 'satt'; there are asympo"),
    (["--methods", "ppo", "sat:alfa=0.9"], "sat has no argument alfa; it takes alpha"),
    (["--methods", "ppo", "sat:alpha=2"], "alpha must lie in (0, 1], got 2"),
    (["--methods", "ppo", "ppo:dual_clip=1"], "dual_clip must lie in (1, inf] or be None, got 1"),
    (["--methods", "ppo", "ppo"], "an entry is given twice"),
    (["--methods", "ppo", "a=sat", "a=gspo"], "two methods have the same label"),
    (["--methods", "sat"], "reference 'ppo' is not among sat"),
    (["--methods"], "at least one is needed"),
    (["--noise", "temperature:tau=0"], "temperature: tau must be above 0"),
    (["--noise", "gaussian:scale"], "'scale' is not argument=value"),
    (["--noise-from", "absent.parquet"], "absent.parquet: cannot be read"),
    (["--config", "absent.toml"], "absent.toml: cannot be read as TOML"),
    (bad_file("seeds = = 3"), "cannot be read as TOML"),
    (bad_file("[seeds]\nx = 1"), "seeds: Input should be a valid integer"),
    (bad_file('experiment = "e9"'), "no experiment 'e9'"),
    (bad_file("experiment = [1]"), "no experiment [1]"),
    (["--methods", "ppo", "_mine=sat"], "a label must not begin with _ or hold $"),
    (["--methods", "ppo", "a$b=sat"], "a label must not begin with _ or hold $"),
    (["--methods", "ppo", "sat:alpha=0.9,alpha=0.5"], "alpha is given twice"),
    (["--lags", "interval@3:n=8"], "is not name[:argument=value,...]"),
    (["--vocab", "4096", "--prompts", "512"], "at most 4,194,304 are allowed"),
    (
        bad_file("seedz = 3"),
        "bad.toml: seedz: there is no such setting; did you mean seeds? (got 3)",
    ),
    (bad_file("lr = 3"), "bad.toml: lr: there is no such setting; did you mean training.lr?"),
    (
        bad_file("[training]\nlearning_rate = 3"),
        "training.learning_rate: there is no such setting; there are training.steps, training.lr",
    ),
    (
        bad_file("[training]\nsteps = true"),
        "bad.toml: training.steps: must be a whole number (got True)",
    ),
    (bad_file('[training]\nlr = "0.5"'), "bad.toml: training.lr: must be a number (got '0.5')"),
    (bad_file("seeds = 2.0"), "bad.toml: seeds: must be a whole number (got 2.0)"),
    (bad_file("lags = [true]"), "lags.0: Input should be a valid string (got True)"),
    (["--lr", "1e400"], "lr: Input should be a finite number (got inf)"),
    (["--lr", "1e308"], "lr: Input should be less than or equal to 1"),
    (["--methods", "ppo", "sat:alpha={[]:1}"], "sat: alpha must lie in (0, 1], got '{[]:1}'"),
    (["--lags", "interval:n={}"], "interval lag needs a whole n >= 1, got '{}'"),
    (["--token-log", "a\nb"], "'a\\nb' of the command line is not a printable text"),
    (bad_file("a = " + "[" * 9000), "bad.toml: cannot be read as TOML (nested too deeply)"),
    (["--config", "/dev/zero"], "/dev/zero: cannot be read as TOML (it is a device)"),
    (bad_log('{"trainer_logprobs": [-1.0]}\n'), "bad.jsonl: column rollout_logprobs is missing"),
    (
        bad_log('{"trainer_logprobs": [NaN], "rollout_logprobs": [-1]}\n'),
        "line 1, token 0: trainer_logprobs is nan",
    ),
    (bad_log("not a log", "bad.parquet"), "bad.parquet: cannot be read"),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_a_mistake_is_one_sentence_and_writes_nothing(words, says, tmp_path, capsys):
    """Exit code 2, the field or file is named, no traceback, no folder."""
    words = words(tmp_path) if callable(words) else words
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--out", str(tmp_path / "out"), *words])
    err = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert stop.value.code == 2
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_unknown_command(capsys):
    """A command that does not exist."""
    with pytest.raises(SystemExit) as stop:
        main(["compair"])
    assert stop.value.code == 2
    assert "no command 'compair'; there are compare" in capsys.readouterr().err


def test_unwritable_folder(tmp_path, capsys):
    """A run folder below a plain file: one sentence, exit 2."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "file" / "x")
    assert stop.value.code == 2
    assert "cannot be written" in capsys.readouterr().err


def cut_short(cell):
    """As a crash of the machine leaves it."""
    cell.write_bytes(cell.read_bytes()[:100])


def half_a_table(cell):
    """A table with the same columns and half of the rows."""
    frame = pl.read_parquet(cell)
    frame.head(len(frame) // 2).write_parquet(cell)


def other_numbers(cell):
    """A table with the same columns and rows and one changed number."""
    frame = pl.read_parquet(cell)
    frame.with_columns(J=pl.col("J") + 1e-9).write_parquet(cell)


def other_cell(cell):
    """The rows of another cell."""
    shutil.copy(sorted(cell.parent.iterdir())[-1], cell)


@pytest.mark.parametrize("damage", [cut_short, half_a_table, other_numbers, other_cell])
@pytest.mark.slow
def test_a_cell_that_is_not_what_was_written_is_run_again(damage, folder, tmp_path, capsys):
    """Its numbers are never believed, a line says so, and the folder ends as if nothing had been."""
    shutil.copytree(folder, tmp_path / "copy")
    cell = sorted((tmp_path / "copy" / "cells").iterdir())[0]
    damage(cell)
    run(tmp_path / "copy")
    said = " ".join(capsys.readouterr().err.split())
    assert f"{cell.name}: does not hold what was written; 1 such cell is run again" in said
    assert contents(tmp_path / "copy") == contents(folder)
    run(tmp_path / "copy")
    assert "does not hold" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["notes.txt", "e1", ".hidden", "claims.json"])
def test_a_folder_of_something_else_is_refused(name, folder, tmp_path, capsys):
    """A file that no run wrote keeps --out away; beside a run's config.toml it is a user's own."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(SystemExit) as stop:
        run(tmp_path)
    assert stop.value.code == 2
    assert f"{tmp_path}: holds {name}, which no run wrote" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    run(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seeds = = 3", "cannot be read as TOML (Invalid value"),
        ("a = " + "[" * 5000, "cannot be read as TOML (nested too deeply)"),
        ("[build]\nx = 1", "build.x is 1 in the run of this folder and not set in this command"),
    ],
)
def test_a_config_of_something_else_is_refused(text, says, tmp_path, capsys):
    """A folder whose config.toml is of another program is left as it is."""
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path)
    assert stop.value.code == 2
    assert f"{tmp_path / 'config.toml'}: {says}" in capsys.readouterr().err
    assert (tmp_path / "config.toml").read_text() == text


HOLD = """
import sys, time
from pathlib import Path
from simlab.study.folder import claimed
with claimed(Path(sys.argv[1]), ("config.toml",)):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_commands_on_one_folder(folder, tmp_path, capsys, no_report):
    """The second says so in one sentence and changes nothing; a killed command holds nothing."""
    out = tmp_path / "copy"
    shutil.copytree(folder, out)
    with subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(SystemExit) as stop:
            run(out)
        assert stop.value.code == 2
        assert f"{out}: another command is running in it" in capsys.readouterr().err
        other.kill()
    assert contents(out) == contents(folder)
    (out / "cells" / "x.parquet.123.part").write_text("half")
    run(out)
    assert not list(out.rglob("*.part"))


def test_a_refused_run_leaves_nothing(tmp_path, capsys):
    """Not even the folders above its own."""
    (tmp_path / "log").write_text("")
    with pytest.raises(SystemExit):
        run(tmp_path / "a" / "b", "--token-log", str(tmp_path / "log"))
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_changed_code_never_meets_old_cells(monkeypatch):
    """The name of a cell depends on the source and on every setting."""
    cell = parse_compare([*TINY, *ARMS]).settings.cells()[0]
    other = parse_compare([*TINY, *ARMS, "--lr", "0.3"]).settings.cells()[0]
    assert len({cell.key("a"), cell.key("b"), other.key("a")}) == 3
    digest = simlab.simulator.compare.source_digest()
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: real(p) + b"#" * (p.name == "ppo.py"))
    assert simlab.simulator.compare.source_digest() != digest


HELPED = """
from knob import SIZE
from simlab.stabilizers import ppo

def surrogate(b, *, eps_low: float = 0.2):
    return ppo.surrogate(b, eps_low=eps_low, eps_high=SIZE)
"""


@pytest.mark.slow
def test_an_edited_helper_of_a_method_is_run_again(tmp_path, monkeypatch, no_report):
    """A module beside the method file is part of the method: its numbers are never the old ones."""
    (tmp_path / "helped.py").write_text(HELPED)
    monkeypatch.syspath_prepend(tmp_path)
    final = []
    for size in (0.2, 1e-4, 0.2):
        (tmp_path / "knob.py").write_text(f"SIZE = {size}  # {'x' * len(final)}")
        sys.modules.pop("knob", None)
        STABILIZERS.pop("helped", None)
        importlib.invalidate_caches()
        run(tmp_path / "run", "--method-file", str(tmp_path / "helped.py"), "--methods", "ppo")
        rows = pl.read_parquet(tmp_path / "run" / "results.parquet")
        final.append(rows.filter(pl.col("arm") == "helped")["J"].to_list())
    del STABILIZERS["helped"]
    assert final[0] == final[2] == rows.filter(pl.col("arm") == "ppo")["J"].to_list()
    assert final[1] != final[0]


def test_a_large_world_takes_smaller_cells():
    """Memory is bounded: fewer seeds share a program when tables are large."""
    words = ["--task", "tree", "--vocab", "6", "--horizon", "5", "--prompts", "2", "--seeds", "24"]
    cells = parse_compare(
        [*words, "--methods", "ppo", "--lags", "1", "--healthy-lag", "1"]
    ).settings.cells()
    largest = cells[0].world.largest
    assert all(len(c.seeds) * largest <= 1 << 22 for c in cells)
    assert sum(len(c.seeds) for c in cells) == 24


FAULTY = """
from simlab.stabilizers import ppo

def surrogate(b):
    if b.logp.shape[-1] == 32:
        {fault}
    return ppo.surrogate(b)
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", ["raise SystemExit(0)", "b.logp.view(7)"])
@pytest.mark.slow
def test_an_error_of_a_method_in_training_is_one_sentence(
    fault, workers, tmp_path, capsys, no_report
):
    """File and line of the method, in one line; --debug shows the traceback as well."""
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY.format(fault=fault))
    for debug in ([], ["--debug"])[: 3 - workers]:
        with pytest.raises(SystemExit) as stop:
            run(tmp_path / "run", "--method-file", str(file), *debug, workers=workers)
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert err.splitlines()[-1].startswith("simlab: faulty at lag 1: ")
        assert err.endswith(f"({file}, line 6)\n")
        assert (err.count("\n") > 5) == ("Traceback" in err) == bool(debug)
    STABILIZERS.pop("faulty")


def die(cell, log):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_dead_worker_is_one_sentence(tmp_path, monkeypatch, capsys):
    """A worker killed from outside, as for memory, ends the run with a sentence, exit 2."""
    monkeypatch.setattr(simlab.simulator.pool, "train", die)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "dead", workers=2)
    assert stop.value.code == 2
    assert "a worker died (out of memory?); finished cells are kept" in capsys.readouterr().err


def test_full_disk(tmp_path, monkeypatch, capsys):
    """A disk that fills up while a cell is written: one sentence, no half-written file."""

    def full(self, data):
        self.write_text("half")
        with Path("/dev/full").open("wb", buffering=0) as disk:
            disk.write(data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "full")
    assert stop.value.code == 2
    assert "cannot be written (No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "full" / "cells").iterdir()) == []


def test_a_preset_lies_under_the_options():
    """A preset sets advantage and aggregation, an option wins over it, a wrong name is a sentence."""
    chosen = parse_compare(["--preset", "dr_grpo"]).settings.training
    assert (chosen.advantage, chosen.aggregation) == ("dr_grpo", "seq_mean_token_sum_norm")
    mixed = parse_compare(["--preset", "dapo", "--advantage", "rloo"]).settings.training
    assert (mixed.advantage, mixed.aggregation) == ("rloo", "token_mean")
    with pytest.raises(ValueError, match="no preset 'grop'; there are dapo"):
        parse_compare(["--preset", "grop"])


ORPHAN = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from simlab.simulator.pool import _context, _worker
if __name__ == "__main__":
    print(ProcessPoolExecutor(1, _context(), _worker).submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_worker_leaves_with_its_parent(tmp_path):
    """The parent is killed by force while a worker waits for work: the worker exits by itself."""
    (tmp_path / "orphan.py").write_text(ORPHAN)
    worker = int(
        subprocess.run([sys.executable, tmp_path / "orphan.py"], stdout=subprocess.PIPE).stdout
    )
    for _ in range(600):
        status = Path(f"/proc/{worker}/stat")
        if not status.exists() or ") Z " in status.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"worker {worker} is still there")


# ---------------------------------------------------------------- the token log
@pytest.fixture
def no_report(monkeypatch):
    """The page takes most of the time of a tiny run, and is not read in these tests."""
    monkeypatch.setattr(simlab.simulator.compare, "write_report", lambda *_: None)


def test_finished_cells_write_no_token_log(folder, tmp_path, capsys, no_report):
    """They are counted in one line, and only the others are logged."""
    shutil.copytree(folder, tmp_path / "run")
    log = tmp_path / "log"
    run(tmp_path / "run", "--token-log", str(log), "--lags", "1", "2", "3")
    err = " ".join(capsys.readouterr().err.split())
    assert "6 of 9 cells were finished already and write no token log" in err
    arms = ("ppo", "sat", "placebo-draws")
    assert {x.name for x in log.iterdir()} == {f"{arm}_lag_3_seeds_0-2" for arm in arms}
    again = tmp_path / "again"
    run(again, "--methods", "ppo", "--token-log", str(log), "--lags", "1")
    assert "token log" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--preset", "dr_grpo", "--lags", "2"],
        ["--aggregation", "seq_mean_token_mean", "--lags", "fully_async:max_age=3,updates=2"],
    ],
    ids=["dr_grpo", "fully_async"],
)
def test_losses_and_gates_are_read_off_the_token_log(tmp_path, no_report, words):
    """The method of the metadata on the logged batch gives the loss and the cut of the results."""
    methods = ["ppo", "mine/sat=sat:alpha=0.6", "gspo", "sat_open:gate=random,rate=0.4"]
    out, log = tmp_path / "run", tmp_path / "log"
    alone = ["--draws", "1", "--healthy-lag", words[-1]]
    run(out, *words, *alone, "--methods", *methods, "--token-log", str(log))
    rows = pl.read_parquet(out / "results.parquet")
    cut = 0
    for place in log.iterdir():
        files = steps(place)
        assert [path.name for path in files] == [f"step_{k:08d}.parquet" for k in (0, 2, 4, 6, 8)]
        for path in files:
            held, settings = read(path)
            b = to_batch(held)
            S, active, _ = bind(settings.stabilizer, **settings.arguments)(b)
            norm = {"horizon": settings.horizon} if settings.horizon else {}
            loss = -mean(*AGGREGATIONS[settings.aggregation](S, b, **norm))
            n = b.mask.sum(-1)
            found = rows.filter(
                pl.col("config") == settings.notes["config"], pl.col("step") == held["step"][0]
            ).sort("seed")
            assert found["arm"].unique().to_list() == [settings.notes["arm"]]
            assert found["seed"].to_list() == [0, 1, 2]
            assert loss.tolist() == pytest.approx(found["loss"].to_list(), abs=1e-6)
            gone = ((b.advantage != 0) & ~active).sum(-1) / n
            assert gone.tolist() == found["cut"].to_list()
            assert b.age.double().mean(-1).tolist() == pytest.approx(found["age"].to_list())
            cut += float(gone.sum())
    assert cut > 0
    assert {path.name for path in log.iterdir()} == {
        f"{quote(arm, safe='=,@+')}_lag_{quote(words[-1], safe='=,')}_seeds_0-2"
        for arm in ("ppo", "mine/sat", "gspo", "sat_open:gate=random,rate=0.4")
    }


def full_log(monkeypatch, where):
    """Token logs alone meet a full disk."""
    real = pl.DataFrame.write_parquet

    def write_parquet(self, path, **more):
        if "metadata" in more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, path, **more)

    monkeypatch.setattr(pl.DataFrame, "write_parquet", write_parquet)


def plain_file(monkeypatch, where):
    """The folder lies below a plain file."""
    where.parent.write_text("")


def other_run(monkeypatch, where):
    """The folder holds the log of a run with another learning rate."""
    run(where / "other", "--lr", "0.1", "--token-log", str(where))


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (full_log, "_seeds_0-2: cannot be written (No space left on device)"),
        (plain_file, "log: cannot be written (Not a directory)"),
        (other_run, "holds the token log of another run; choose another --token-log"),
    ],
)
def test_a_token_log_that_cannot_be(tmp_path, monkeypatch, capsys, no_report, trouble, says):
    """One sentence that names the folder, exit 2, and no half-written file."""
    where = tmp_path / "below" / "log"
    trouble(monkeypatch, where)
    before = contents(where)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", "--token-log", str(where))
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert says in " ".join(err.split())
    assert "Traceback" not in err
    assert contents(where) == before
