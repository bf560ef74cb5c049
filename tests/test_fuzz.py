"""Bad input of every kind: no traceback, one line on stderr, exit code 2, and nothing half-written.

What is accepted is not run: training, tables and the attack on the claims are left out, which lets
some five hundred inputs through the real command in seconds. Every draw is seeded.
"""

import json
import random
import shutil
import traceback
from collections import Counter
from hashlib import sha256
from pathlib import Path

import polars as pl
import pytest
import tomli_w

import simlab.simulator.compare
import simlab.simulator.pool
import simlab.simulator.report
import simlab.verify.run
from simlab.__main__ import main
from simlab.simulator.config import Config
from simlab.stabilizers import STABILIZERS, ppo
from simlab.study.command_line import LONGEST
from simlab.verify.claims import CLAIMS
from theory.search import as_json

COUNTS = {
    "command line": 120, "toml": 130, "method file": 70, "log": 60, "run folder": 60, "instance": 80
}  # fmt: skip
WORDS = (
    "", " ", "\0", "\n", "\x1b[31m", "é", "\udcff", "-", "--", "=", ":", "@", ",", "*", "[ab]", "~",
    ".", "..", "/", "/dev/full", "/dev/null", "/dev/zero", "a" * 5000, "9" * 5000, "-1", "0", "1e400",
    "1e308", "nan", "inf", "true", "none", "{}", "{[]:1}", "[" * 3000, "(" * 300, "0x10", "1if", "$x",
    "sat:alpha={[]:1}", "ppo@99999999999999999999", "a=b=c", "_x=ppo", "ppo:eps_low=1e999", "x.py",
    "interval:n={}", "interval:n=1e9", "fully_async:max_age=[]", "router:scale='", "tests", "x\ty",
)  # fmt: skip
VALUES = (
    True, "0.5", "", 2.0, 0.1, -1, 0, 10**400, float("inf"), float("nan"), [], [[]], [1, "a"], {},
    {"x": 1}, [True], "a\0b", "é" * 3000, ["ppo", "ppo"], "ppo", ["sat:alpha={[]:1}"], [""],
)  # fmt: skip
OPTIONS = (
    "--lr", "--seeds", "--lags", "--methods", "--noise", "--task", "--policy", "--prompts", "--vocab",
    "--steps", "--grad-clip", "--optimizer", "--experiment", "--config", "--preset", "--noise-from",
    "--method-file", "--out", "--token-log", "--workers", "--quick", "--reference", "--lrr", "--help",
)  # fmt: skip


def line(seed):
    """A row of a log that is accepted: thirty tokens, engine noise of 0.05 nats."""
    rng = random.Random(seed)
    before = [-0.1 - rng.expovariate(1) for _ in range(30)]
    noisy = [min(x + rng.gauss(0, 0.05), -1e-3) for x in before]
    return {"trainer_logprobs_before": before, "rollout_logprobs": noisy}


LINES = [line(seed) for seed in range(3)]
METHODS = (
    "", "def (", "import nowhere", "surrogate = 3", "raise SystemExit(0)", "raise RuntimeError('a\\nb')",
    "class Stop(BaseException): pass\nraise Stop", "{ppo}\nwhole_batch = 3", "x = " + "(" * 400,
    "def f(): f()\nf()", "\0", "# \xe9\n{ppo}", "def surrogate(): pass", "def surrogate(b): pass",
    "def surrogate(b): return b.nothing", "def surrogate(b):\n    raise SystemExit(0)",
    "def surrogate(b, *, eps: float): return 1 / 0", "def surrogate(b, *, eps: lost = 1): return b",
    "{ppo}\nraise ValueError('x' * 100000)", "def surrogate(b): return surrogate(b)",
    "def surrogate(b):\n    return b.logp, b.mask, {{}}", "{ppo}\nwhole_batch = lambda b: 1 / 0",
)  # fmt: skip


@pytest.fixture
def untrained(monkeypatch):
    """Accepted input stops before anything is trained, attacked or drawn."""

    def train(cell, log):
        return [{"seed": seed, "step": 0, "J": 0.5} for seed in cell.seeds]

    monkeypatch.setattr(simlab.simulator.pool, "train", train)
    monkeypatch.setattr(simlab.simulator.compare, "_write_tables", lambda *_: None)
    monkeypatch.setattr(simlab.simulator.report, "sentences", lambda *_: [])
    monkeypatch.setattr(simlab.verify.run, "_verify", lambda *_: [])
    monkeypatch.setattr(simlab.simulator.compare, "source_digest", lambda: "code")
    monkeypatch.setattr(simlab.simulator.compare, "commit", lambda: "commit")
    monkeypatch.setattr(simlab.simulator.compare, "in_pool", simlab.simulator.pool.in_process)


def spoiled(rng, text):
    """Bytes of a text that was cut, doubled, or met other bytes."""
    data = text.encode(errors="surrogateescape")
    at = rng.randrange(len(data) + 1)
    odd = rng.choice([b"\0", b"\xff\xfe", b"\n", b"[" * 3000, b"= =", b'"', b"\xed\xa0\x80", b"{"])
    return rng.choice([data[:at], data + data, data[:at] + odd + data[at:], b"", odd])


def file_of(rng, folder, name, data):
    """A file with these bytes; at times a folder, a dead link or nothing at all stands in its place."""
    path, odd = folder / name, rng.random()
    if odd < 0.04:
        path.mkdir()
    elif odd < 0.08:
        path.symlink_to(folder / "nowhere")
    elif odd > 0.04:
        path.write_bytes(data)
    return str(path)


def command_line(rng, folder):
    """Options with odd values, odd words among them."""
    words = ["--methods", "ppo", "--lags", "1", "--seeds", "2", "--out", str(folder / "out")]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(words) + 1)
        words[at : at + rng.randint(0, 1)] = [rng.choice(OPTIONS)] * rng.randint(0, 1)
        words.insert(min(at + 1, len(words)), rng.choice(WORDS))
    odd = [["methods", rng.choice(WORDS)], ["verify", *words[-2:], *words[:1]], words]
    return ["compare", *words] if rng.random() < 0.85 else rng.choice(odd)


def toml(rng, folder):
    """Settings of another type or name, and files that are not TOML."""
    settings = Config(methods=("ppo", "sat"), lags=("1",)).model_dump(
        mode="json", exclude_none=True
    )
    settings |= {"experiment": "e1"}
    for _ in range(rng.randint(1, 2)):
        table = rng.choice([settings, settings, *(x for x in settings.values() if x)])
        if isinstance(table, dict) and table:
            name = rng.choice([*table])
            value = table.pop(name) if rng.random() < 0.3 else rng.choice(VALUES)
            table[rng.choice([name, name, name, name + "s", "lr", "é"])] = value
    text = tomli_w.dumps(settings)
    data = spoiled(rng, text) if rng.random() < 0.3 else text.encode()
    path = file_of(rng, folder, "x.toml", data)
    return ["compare", "--config", path, "--out", str(folder / "out")]


def method_file(rng, folder):
    """Code that is not a stabilizer, by way of a TOML file, which is checked first."""
    own = Path(ppo.__file__).read_text()
    text = rng.choice(METHODS).replace("{ppo}", own).replace("{{}}", "{}")
    data = text.encode("latin-1") if rng.random() < 0.7 else spoiled(rng, own)
    name = rng.choice([f"own_{rng.random()}".replace(".", "_")] * 6 + ["ppo", "a b", "_x", "1"])
    path = file_of(rng, folder, f"{name}{rng.choice(['.py'] * 8 + ['', '.txt'])}", data)
    settings = {"methods": ["ppo"], "lags": ["1"], "method_file": [path]}
    (folder / "x.toml").write_text(tomli_w.dumps(settings))
    return ["compare", "--config", str(folder / "x.toml"), "--out", str(folder / "out")]


def log(rng, folder):
    """Rows with other columns, numbers and lengths, and files that are no log."""
    rows = [dict(row) for row in LINES]
    for _ in range(rng.randint(0, 2)):
        row, name = rng.choice(rows), rng.choice([*LINES[0]])
        row[name] = rng.choice([None, 3, "x", [], [None] * 30, [True] * 30, ["a"], [1e999] * 30,
                                [0.5] * 30, [[-1.0]] * 30, {}, [-1e400], [-1.0] * 29])  # fmt: skip
    row = rng.choice(rows)
    row |= rng.choice([{}, {"loss_mask": rng.choice([[2] * 30, "x", [0] * 30])}, {1: 2}])
    row.pop(rng.choice([*row, None]), None)
    text = "\n".join(json.dumps(row) for row in rows)
    name, data = f"{rng.choice(['x', '[x]', '*', 'a?'])}.jsonl", text.encode()
    if rng.random() < 0.3:
        pl.DataFrame(LINES).write_parquet(folder / "whole.parquet")
        name, whole = "x.parquet", (folder / "whole.parquet").read_bytes()
        at = rng.randrange(len(whole))
        data = rng.choice([whole[:at], whole[:at] + b"\0\xff" + whole[at + 2 :], text.encode()])
    elif rng.random() < 0.4:
        data = spoiled(rng, text)
    path = file_of(rng, folder, name, data)
    settings = {"methods": ["ppo"], "lags": ["1"], "noise_from": path}
    (folder / "x.toml").write_text(tomli_w.dumps(settings))
    return ["compare", "--config", str(folder / "x.toml"), "--out", str(folder / "out")]


def run_folder(rng, folder):
    """A finished run, then one of its files spoiled, another put beside it, or another run asked for."""
    out = folder / "out"
    words = ["compare", "--methods", "ppo", "sat", "--lags", "1", "--seeds", "2", "--workers", "1"]
    if not (whole := folder.parent / "whole").exists():
        main([*words, "--out", str(whole)])
        (whole / "results.parquet").write_text("rows")
    shutil.copytree(whole, out)
    for _ in range(rng.randint(0, 2)):
        path = rng.choice(sorted(path for path in out.rglob("*") if path.is_file()))
        kind = rng.randrange(5)
        if kind == 0:
            path.write_bytes(spoiled(rng, path.read_bytes().decode(errors="surrogateescape")))
        elif kind == 1:
            path.write_bytes(rng.choice(sorted(out.glob("cells/*"))).read_bytes())
        elif kind == 2:
            path.rename(
                path.with_name(rng.choice(["notes", "x.part", "a-b.parquet", "config.toml"]))
            )
        elif kind == 3:
            path.unlink()
            path.mkdir()
        else:
            (path.parent / rng.choice(["notes", "[x].parquet", "-.parquet", "x.1.part"])).touch()
    return [*words, *rng.choice([[], [], ["--lr", "3"]]), "--out", str(rng.choice([out, folder]))]


def instance(rng, folder):
    """Fields of other shapes, kinds and names, and files that are not JSON."""
    number = rng.choice([*CLAIMS])
    held = as_json(CLAIMS[number].tight()[0][0])
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([*held])
        odd = [None, True, "x", [], {}, 1e999, 10**400, [[1]], [held[name]], [[[0.5, 0.5]], [[1]]]]
        value = rng.choice([*odd, held.pop(name), [-1.0, 2.0]])
        held[rng.choice([name, name, name, "é"])] = value
    text = json.dumps(rng.choice([held] * 8 + [[held], 3, None, {}]))
    data = spoiled(rng, text) if rng.random() < 0.2 else text.encode()
    path = file_of(rng, folder, "x.json", data)
    return ["verify", "--claim", str(rng.choice([number] * 9 + [99])), "--instance", path]


def contents(folder):
    """What stands in a folder: bytes of files, names of the rest; the lock is nobody's."""
    paths = [path for path in sorted(folder.rglob("*")) if path.name != ".lock"]
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


KINDS = {
    "command line": command_line, "toml": toml, "method file": method_file, "log": log,
    "run folder": run_folder, "instance": instance,
}  # fmt: skip


def answer(words, folder, capsys):
    """Exit code of a command, and what is wrong with the way in which it ended, if anything."""
    before = contents(folder)
    try:
        main(words)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as error:
        return 1, "".join(traceback.format_exception(error)[-3:])
    err = capsys.readouterr().err
    if code not in (0, 1, 2):
        return code, f"exit code {code}"
    if code == 2:
        if not (err.startswith("simlab: ") and err.count("\n") == 1 and len(err) < LONGEST + 50):
            return code, f"not one line: {err:.2000}"
        if contents(folder) != before:
            return code, f"the folder changed: {err}"
    return code, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_no_input_ends_in_a_traceback(kind, tmp_path, capsys, untrained, monkeypatch):
    """Refused: one line, exit code 2, every file as before. Some inputs of each kind are refused."""
    ended, wrong, known = Counter(), [], {*STABILIZERS}
    for i in range(COUNTS[kind]):
        folder = tmp_path / str(i)
        folder.mkdir()
        monkeypatch.chdir(folder)
        words = KINDS[kind](random.Random(f"{kind} {i}"), folder)
        capsys.readouterr()
        code, trouble = answer(words, folder, capsys)
        for name in STABILIZERS.keys() - known:
            del STABILIZERS[name]
        ended[code] += 1
        wrong += [f"{kind} {i}: {words!r:.300}\n{trouble}"] if trouble else []
        for cell in (folder / "out" / "cells").glob("????????????????-*.parquet"):
            if code == 0 and kind == "run folder" and cell.is_file():
                assert cell.stem.endswith(sha256(cell.read_bytes()).hexdigest()[:16]), words
    assert not wrong, "\n\n".join(wrong)
    assert ended[2] > COUNTS[kind] // 4, ended
    assert ended[0] > 0, ended


def test_enough_inputs():
    """The number of inputs that the suite promises."""
    assert COUNTS.keys() == KINDS.keys()
    assert sum(COUNTS.values()) >= 500
