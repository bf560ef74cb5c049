"""The asynchronous pipeline on Ray: lag by value, equality to the last bit, deaths, hangs, full disks.

One cluster and one engine serve most tests; only those about deaths start others.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import polars as pl
import psutil
import pytest
import ray
import torch

from scaleup.models import tiny
from scaleup.recipe import RunSpec, load
from scaleup.run.cluster import ControllerActor, cluster
from scaleup.run.metrics import read
from scaleup.trainer.checkpoint import latest
from simlab.core import columns
from simlab.study.settings import RunError
from simlab.study.specs import regime
from simlab.study.strict import ConfigError
from simlab.token_log import files as token_log

CLOCK = {"seconds", "engine_busy", "trainer_busy", "engine_restarts", "queue", "in_flight"}
LOGGED = {"world.trainer.keep_weights": True, "world.token_log_every": 1}
EVALUATED = {
    "world.evaluate_every": 2,
    "world.evaluation": {"task": "residue", "problems": 3, "samples": 2, "repeats": 2},
}
TIMEOUT = (
    20.0  # of the engine that hangs; a training step is far below, a start has a limit of its own
)


def changes(model, **more):
    """The recipe of these tests: four prompts, four answers of eight tokens, in float32."""
    found = {
        "world.model": str(model),
        "training.steps": 6,
        "world.prompts": 4,
        "world.answers": 4,
        "world.max_new_tokens": 8,
        "world.engine.dtype": "float32",
    }
    return found | {name.replace("__", "."): value for name, value in more.items()}


def run_spec(model, lag="1", method="sat-grpo", seed=0, **more):
    """One run of it."""
    recipe = load("tiny_cpu", changes(model, **more))
    arm = next(arm for arm in recipe.arms if arm.label == method)
    return RunSpec(recipe.world, recipe.training, arm, lag, "none", seed)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights that every run begins with."""
    return tiny.write(tmp_path_factory.mktemp("model"), "qwen3_moe", seed=0)


@pytest.fixture(scope="module")
def pipeline(model):
    """`run(spec, out)` on one cluster and one engine."""
    with cluster(run_spec(model).world) as run:
        yield run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of runs that several tests read."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(pipeline, model, root):
    """Interval 1, undisturbed, with every log."""
    out = root / "one"
    return out, list(pipeline(run_spec(model, "1", **LOGGED), out))


@pytest.fixture(scope="module")
def two(pipeline, model, root):
    """Interval 2, undisturbed: the curve that disturbed runs must have."""
    return list(pipeline(run_spec(model, "2"), root / "two"))


@pytest.fixture(scope="module")
def evaluated(pipeline, model, root):
    """The run of `two` with evaluations."""
    return list(pipeline(run_spec(model, "2", **EVALUATED), root / "evaluated"))


def curve(rows):
    """Rows without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]


def tokens(path):
    """Flat columns of a file of the token log."""
    rows = pl.read_parquet(path)
    names = [
        "weight_versions",
        "rollout_logprobs",
        "trainer_logprobs",
        "trainer_logprobs_before",
    ]
    found = rows.select("response", "step", *names).explode(names)
    return {name: found[name].to_numpy() for name in found.columns}


def logged(out, steps=6):
    """The token log of a run, step by step."""
    files = sorted((out / "token_log").iterdir())
    assert [f.name for f in files] == [f"step_{k:08d}.parquet" for k in range(steps)]
    return [tokens(f) for f in files]


# ---------------------------------------------------------------- the lag, by value
def check_lag(steps):
    """Each token's log-prob is that of the trainer at the version that it is stamped with."""
    stale = []
    for step, t in enumerate(steps):
        assert np.abs(t["trainer_logprobs_before"] - t["rollout_logprobs"]).max() < 1e-5
        old = t["weight_versions"] < step
        stale.append(np.abs(t["trainer_logprobs"] - t["rollout_logprobs"])[old])
    # the negative control: another version's weights give other log-probs
    assert np.median(np.concatenate(stale)) > 1e-3


@pytest.mark.parametrize("n", [1, 3])
def test_interval_lag_is_what_it_says(pipeline, model, root, one, n):
    """Interval n: log-probs at the stamped version, and versions and ages of the simulator's regime."""
    out = one[0] if n == 1 else root / "three"
    rows = one[1] if n == 1 else list(pipeline(run_spec(model, "3", **LOGGED), out))
    steps, lag = logged(out), regime(str(n))
    check_lag(steps)
    for step, t in enumerate(steps):
        assert set(t["weight_versions"]) == set(lag.versions(step, 8))
        assert rows[step]["age_max"] == rows[step]["age"] == step - lag.version(step)
        assert rows[step]["queue"] <= lag.largest_age


def test_fully_async_updates_answers_in_flight(pipeline, model, tmp_path):
    """Answers of 96 tokens go on under new weights, and each span is of the version it is stamped with."""
    spec = run_spec(model, "fully_async:max_age=2", world__max_new_tokens=96, **LOGGED)
    rows = list(pipeline(spec, tmp_path))
    steps = logged(tmp_path)
    check_lag(steps)
    mixed = 0
    for step, t in enumerate(steps):
        versions = t["weight_versions"].reshape(16, 96)
        assert (np.diff(versions) >= 0).all()
        assert step - versions.min() == rows[step]["age_max"] <= 2
        assert rows[step]["queue"] <= 2
        mixed += (versions[:, 0] < versions[:, -1]).sum()
    assert mixed > 0


def test_row_is_the_token_log(one):
    """d_bar, its parts, the KL estimators and ages of a row are those of the logged tokens."""
    out, rows = one
    sat = {
        "q",
        "gate_rate",
        "c_min",
        "radius_low",
        "radius_high",
        "clip_high",
        "clip_low",
        "overflow",
    }
    assert rows[0].keys() - sat <= columns.LOGGED  # names that no method may take
    for row, t in zip(rows, logged(out), strict=True):
        new, mu = t["trainer_logprobs"].astype(float), t["rollout_logprobs"].astype(float)
        old = t["trainer_logprobs_before"].astype(float)
        d = new - mu
        assert row["tokens"] == len(d) == 128
        found = {
            "d_bar": np.abs(d).mean(),
            "k2": (d**2).mean() / 2,
            "k1": -d.mean(),
            "k3": np.expm1(d).mean() - d.mean(),
            "d_policy": np.abs(new - old).mean(),
            "d_engine": np.abs(old - mu).mean(),
            "d_max": np.abs(d).max(),
            "age": (row["step"] - t["weight_versions"]).mean(),
        }
        assert {k: row[k] for k in found} == pytest.approx(found, rel=1e-6, abs=1e-9)
        assert (np.abs(d) <= np.abs(new - old) + np.abs(old - mu) + 1e-12).all()
        held = pl.read_parquet(out / "token_log" / f"step_{row['step']:08d}.parquet")
        assert row["reward"] == pytest.approx(held["reward"].mean())
        assert held["group"].to_list() == [i // 4 for i in range(16)]


# ---------------------------------------------------------------- equality to the last bit
def test_tensorboard_has_the_rows(one):
    """The same numbers under the same steps, as float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, rows = one
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    for name in ("reward", "d_bar", "cut", "age_max"):
        found = board.Scalars(name)
        assert [x.step for x in found] == [row["step"] for row in rows]
        assert [x.value for x in found] == pytest.approx([row[name] for row in rows], rel=1e-6)


def test_one_seed_is_one_curve(pipeline, model, root, one, tmp_path):
    """Runs of one seed are equal; logs and kept weights change nothing; another seed is another run."""
    a = list(pipeline(run_spec(model, "0"), tmp_path / "a"))
    b = list(pipeline(run_spec(model, "0"), tmp_path / "b"))
    assert curve(a) == curve(b)
    parts = ("d_policy", "d_engine")
    again = list(pipeline(run_spec(model, "1"), tmp_path / "c"))
    assert curve(again) == [{k: v for k, v in x.items() if k not in parts} for x in curve(one[1])]
    other = list(pipeline(run_spec(model, "1", seed=1, training__steps=1), tmp_path / "d"))
    assert other[0]["samples"] != again[0]["samples"]
    nothing_late = list(pipeline(run_spec(model, "fully_async:max_age=0"), tmp_path / "e"))
    assert curve(nothing_late) == curve(a)  # synchronous is fully asynchronous without any age
    assert read(tmp_path / "a" / "metrics.jsonl") == a


def test_evaluation_is_beside_the_run(two, evaluated):
    """avg@k at the pushes after steps 2, 4 and the last, of three problems, and no other row changes."""
    assert [row["step"] for row in evaluated if "avg_at_k" in row] == [1, 3, 5]
    for row in evaluated[1::2]:
        assert 0 <= row["avg_at_k_low"] <= row["avg_at_k"] <= row["avg_at_k_high"] <= 1
        assert 0 < row["avg_at_k_noise"] < 0.2
        # rewards are multiples of 1/8, three problems of four answers
        whole = row["avg_at_k"] * 8 * 12
        assert whole == pytest.approx(round(whole), abs=1e-6)
    rest = [{k: v for k, v in x.items() if not k.startswith("avg_at_k")} for x in curve(evaluated)]
    assert rest == curve(two)


def test_tensors_are_read_where_the_store_holds_them(pipeline):
    """Between actors: two readers of one object see the same memory."""

    def twice():
        ref = ray.put([torch.arange(2**20)])
        (a,), (b,) = ray.get(ref), ray.get(ref)
        return a.data_ptr() == b.data_ptr(), bool((a == torch.arange(2**20)).all())

    assert ray.get(ray.remote(twice).options(num_cpus=0).remote(), timeout=100) == (True, True)


def test_a_run_goes_on_in_another_layout(pipeline, model, two, tmp_path):
    """Four steps on one rank, the rest on two with tensor and expert parallelism: the same answers."""
    more = {"world__checkpoint_every": 4}
    rows = pipeline(run_spec(model, "2", **more), tmp_path)
    for row in rows:
        if row["step"] == 4:  # the checkpoint of step 4 is written
            processes("ray::Rank")[0].kill()
            break
    refused(rows)
    more |= {"world__trainer__ranks": 2, "world__trainer__tp": 2, "world__trainer__ep": 2}
    rest = list(pipeline(run_spec(model, "2", **more), tmp_path))
    assert [row["step"] for row in rest] == [4, 5]
    assert [row["samples"] for row in rest] == [row["samples"] for row in two[4:]]
    for name in ("loss", "d_bar", "grad_norm"):
        assert [row[name] for row in rest] == pytest.approx([x[name] for x in two[4:]], abs=1e-5)


LAYOUTS = {"DP2": {}, "TP2 EP2": {"world.trainer.tp": 2, "world.trainer.ep": 2}}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_ranks_are_one(pipeline, model, one, tmp_path, layout):
    """Two trainer ranks give the curve, and the token log, of one."""
    more = LOGGED | layout | {"world.trainer.ranks": 2, "training.steps": 3}
    rows = list(pipeline(run_spec(model, "1", **more), tmp_path))
    for mine, other in zip(rows, one[1], strict=False):
        for name in ("samples", "tokens", "updated", "served", "age"):
            assert mine[name] == other[name]
        for name in ("loss", "grad_norm", "q", "d_bar", "d_policy", "d_max", "entropy", "reward"):
            assert mine[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), name
    for mine, other in zip(logged(tmp_path, 3), logged(one[0]), strict=False):
        assert (mine["response"] == other["response"]).all()
        for name in ("trainer_logprobs", "trainer_logprobs_before"):  # Adam enlarges rounding
            np.testing.assert_allclose(mine[name], other[name], atol=1e-4)


# ---------------------------------------------------------------- deaths
def processes(title, of=None):
    """Descendants of this process (or of `of`) whose title begins so."""
    found = []
    for p in (of or psutil.Process()).children(recursive=True):
        try:
            if " ".join(p.cmdline()).startswith(title):
                found.append(p)
        except psutil.Error:
            continue
    return found


def during(title, seconds=60.0):
    """The process that works on a call, as soon as it does."""
    name, end = title.split(".")[0], time.monotonic() + seconds
    (process,) = processes(name)
    while time.monotonic() < end:
        if process.cmdline()[0].startswith(title):
            return process
    raise AssertionError(f"no {title} in {seconds} s")


@pytest.mark.parametrize("victim", ["ray::EngineActor", "sglang::scheduler"])
def test_dead_engine(pipeline, model, two, tmp_path, victim):
    """With answers in flight, the engine or SGLang's scheduler is killed: the curve is the undisturbed one."""
    rows = []
    for row in pipeline(run_spec(model, "2"), tmp_path):
        rows.append(row)
        if row["step"] == 1:
            engine = during("ray::EngineActor.collect")
            (engine if victim in engine.cmdline()[0] else processes(victim, engine)[0]).kill()
    assert rows[-1]["engine_restarts"] == 1
    assert curve(rows) == curve(two)


def test_dead_trainer(pipeline, model, evaluated, tmp_path):
    """A killed rank is a sentence, and the same run resumes to the undisturbed curve."""
    spec = run_spec(model, "2", world__checkpoint_every=2, **EVALUATED)
    rows = pipeline(spec, tmp_path)
    for row in rows:
        if row["step"] == 3:
            processes("ray::Rank")[0].kill()
            break
    assert "trainer rank 0 died; the same command resumes" in refused(rows)
    first = len(read(tmp_path / "metrics.jsonl"))
    held = torch.load(latest(tmp_path / "checkpoints") / "run.pt")
    assert len(held["ready"]) == 8  # two batches of accepted answers wait
    rest = list(pipeline(spec, tmp_path))
    assert [row["step"] for row in rest] == list(range(rest[0]["step"], 6))
    assert 0 < rest[0]["step"] <= first
    rows = read(tmp_path / "metrics.jsonl")
    assert curve(rows) == curve(evaluated)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)  # a resumed run goes on counting
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000006"]
    assert list(pipeline(spec, tmp_path)) == []  # a finished run has nothing left


def command(folder, model):
    """`scaleup run` in a process of its own."""
    words = ["run", "tiny_cpu", "--method=sat-grpo", "--lag=2", f"--out={folder / 'run'}", "--set"]
    words += [f"{k}={v}" for k, v in changes(model, world__checkpoint_every=2).items()]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "scaleup", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=240.0):
    """Poll until it holds."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def alive(family):
    """Those of these processes that live."""
    return [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def gone(family, seconds=30.0):
    """None of these processes lives on."""
    wait_for(lambda: not alive(family), seconds)


@pytest.fixture(scope="module")
def agents():
    """Ray's two agents of a killed cluster: each takes a minute to report it to the dead one."""
    late = []
    yield late
    gone(late, 90)


def test_dead_controller_and_dead_command(pipeline, model, two, tmp_path, agents):
    """The controller is killed, then the whole command; nothing is left behind, and the curve is whole."""
    out = tmp_path / "run"
    first = command(tmp_path, model)
    wait_for(lambda: len(read(out / "metrics.jsonl")) >= 3 or first.poll())
    me = psutil.Process(first.pid)
    family = me.children(recursive=True)
    assert any("sglang::scheduler" in " ".join(p.cmdline()) for p in family)
    processes("ray::ControllerActor", me)[0].kill()
    _, said = first.communicate(timeout=120)
    assert first.returncode == 2
    assert said == "scaleup: the controller died; the same command resumes at the last checkpoint\n"
    gone(family)
    at = len(read(out / "metrics.jsonl"))
    second = command(tmp_path, model)
    wait_for(lambda: len(read(out / "metrics.jsonl")) > at or second.poll())
    me = psutil.Process(second.pid)
    family = me.children(recursive=True)
    agents += processes("ray::DashboardAgent", me) + processes("ray::RuntimeEnvAgent", me)
    assert len(agents) == 2
    second.kill()
    second.communicate()
    gone([p for p in family if p not in agents])
    spec = run_spec(model, "2", world__checkpoint_every=2)
    list(pipeline(spec, out))
    assert curve(read(out / "metrics.jsonl")) == curve(two)


def test_ctrl_c(model, tmp_path):
    """Ctrl-C while engines start: a sentence, exit code 130, and nothing is left behind."""
    started = command(tmp_path, model)
    me = psutil.Process(started.pid)
    wait_for(lambda: processes("ray::EngineActor", me) or started.poll())
    family = me.children(recursive=True)
    os.kill(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert said == "\nscaleup: stopped; the same command resumes\n"
    gone(family)


# ---------------------------------------------------------------- what cannot go on
def refused(rows):
    """The one sentence of a run that fails."""
    with pytest.raises(RunError) as error:
        list(rows)
    said = str(error.value)
    assert "\n" not in said
    assert "Traceback" not in said
    return said


def test_checkpoints_that_do_not_belong(pipeline, model, tmp_path):
    """Of other settings, torn in its state, torn in its weights: a sentence that names it."""
    spec = run_spec(model, "2", world__checkpoint_every=2, training__steps=4)
    list(pipeline(spec, tmp_path))
    folder = tmp_path / "checkpoints" / "step_00000004"
    other = run_spec(model, "2", world__checkpoint_every=2, training__steps=4, training__lr=1e-3)
    assert refused(pipeline(other, tmp_path)) == (
        f"{tmp_path}: holds another run, its training.lr differs; choose another --out"
    )
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "checkpoints", moved / "checkpoints")
    assert refused(pipeline(other, moved)) == (
        f"{moved}/checkpoints/{folder.name}: is a checkpoint of another run, its training.lr differs"
    )
    # settings that change no number may differ
    assert list(pipeline(run_spec(model, "2", training__steps=4), tmp_path)) == []
    rows = tmp_path / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))  # not finished
    weights = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert refused(pipeline(spec, tmp_path)).startswith(f"{folder}: ")
    weights.write_bytes(whole)
    state = folder / "run.pt"
    state.write_bytes(state.read_bytes()[:200])
    assert refused(pipeline(spec, tmp_path)).startswith(f"{state}: is no state of a run")


@pytest.fixture
def disk(tmp_path):
    """`disk(size)`: a folder on a file system of so many bytes."""
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        return folder

    yield mount
    subprocess.run(["umount", folder], check=False)


def test_full_disk(pipeline, model, disk):
    """A disk that is full at a checkpoint, and then at the metrics: the file is named, nothing is torn."""
    out = disk("1m") / "run"
    spec = run_spec(model, "0", world__checkpoint_every=2)
    said = refused(pipeline(spec, out))
    assert said.startswith(f"checkpoint of step 2 in {out}/checkpoints: ")
    assert said.endswith("(0 MB of the disk were free)")
    assert list((out / "checkpoints").iterdir()) == []
    assert len(read(out / "metrics.jsonl")) == 2
    (out / "filler").write_bytes(b"x" * (2**20 - 4096 * 16))
    with (out / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(b"x" * 1024):
                pass
        except OSError:
            pass
    said = refused(pipeline(spec, out))
    assert re.fullmatch(rf"{out}/\S+: cannot be written \(No space left on device\)", said)
    text = (out / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    assert not list(out.rglob("*.part"))


def test_token_log_on_a_full_disk(pipeline, model, disk):
    """The file that does not fit is named and left out; those before it can be read."""
    out = disk("128k") / "run"
    spec = run_spec(model, "0", world__token_log_every=1, world__max_new_tokens=96)  # large files
    said = refused(pipeline(spec, out))
    file = re.match(rf"({out}/token_log/step_\d+\.parquet): cannot be written \(", said)[1]
    assert "No space left on device" in said
    held = sorted((out / "token_log").iterdir())
    assert len(held) == len(read(out / "metrics.jsonl")) > 0
    assert [len(token_log.read(path).rows) for path in held] == [16] * len(held)
    assert file == str(out / "token_log" / f"step_{len(held):08d}.parquet")


def test_hung_update(pipeline, model, tmp_path):
    """An engine that is stopped in a push: one sentence names it and the version."""
    spec = run_spec(model, "0", world__engine__timeout=TIMEOUT, training__steps=200)
    rows = pipeline(spec, tmp_path)
    for row in rows:
        if row["step"] == 1:
            break
    engine = during("ray::EngineActor.push")
    engine.suspend()
    said = refused(rows)
    assert re.fullmatch(r"engine 0 did not take version \d+ within 20 s and was stopped", said)
    gone([engine])


RANKS = {
    "kill": r"trainer rank [01] died; the same command resumes at the last checkpoint",
    "suspend": r"trainer ranks \[0, 1\] did not finish within 20 s",
}


@pytest.mark.parametrize("what", RANKS)
def test_one_of_two_ranks(pipeline, model, tmp_path, what):
    """One rank of two dies or hangs: the other, which waits for it, is ended too, and a sentence says so."""
    more = {"world__trainer__ranks": 2, "world__engine__timeout": TIMEOUT, "training__steps": 200}
    rows = pipeline(run_spec(model, "0", **more), tmp_path)
    for row in rows:
        if row["step"] == 1:
            break
    ranks = processes("ray::Rank")
    getattr(ranks[1], what)()
    assert re.fullmatch(rf"\w+ (of version )?\d+: {RANKS[what]}", refused(rows))
    gone(ranks)


def test_two_engines_are_one(pipeline, model, two, tmp_path):
    """Prompts shared over two engines: the same answers, as each has a seed of its own."""
    rows = list(pipeline(run_spec(model, "2", world__engine__count=2), tmp_path))
    assert [row["samples"] for row in rows] == [row["samples"] for row in two]
    assert [row["d_bar"] for row in rows] == pytest.approx([row["d_bar"] for row in two], abs=1e-6)


# ---------------------------------------------------------------- without an engine
def before_start(spec, out):
    """The rows of a controller that starts nothing: one sentence."""
    return list(ControllerActor().run(spec, str(out)))


def test_what_does_not_fit_is_said_before_anything_starts(model, tmp_path):
    """A model without a config, a task without a tokenizer, too few tokens or problems."""
    assert before_start(run_spec(tmp_path), tmp_path) == [
        f"world.model: {tmp_path} holds no config.json"
    ]
    gym = {"world.task": "reasoning_gym", "world.task_options": {"dataset": "chain_sum"}}
    said = before_start(run_spec(model, **gym), tmp_path)
    assert said == ["this task needs a tokenizer, and the model's folder has none"]
    small = tiny.write(tmp_path / "small", "qwen3_moe", vocab_size=16)
    assert before_start(run_spec(small), tmp_path) == [
        "task residue has token 23, the model has 16"
    ]
    evaluation = {
        "world.evaluate_every": 2,
        "world.evaluation": {"task": "residue", "problems": 9, "samples": 1},
    }
    assert before_start(run_spec(model, **evaluation), tmp_path) == [
        "world.evaluation: 9 problems, but the task has 8 (0 with prompts that are too long are left out)"
    ]
    assert not (tmp_path / "settings.json").exists()  # no run has begun


def test_foreign_tokenizer(model, tmp_path):
    """A tokenizer with more tokens than the model: one sentence."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = tiny.write(tmp_path / "model", "qwen3_moe")
    words = {f"w{i}": i for i in range(600)}
    kept = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w1"
    )
    kept.save_pretrained(folder)
    said = before_start(run_spec(folder), tmp_path)
    assert said == ["the tokenizer has token 599, but the model's vocabulary ends at 511"]


def test_score_centering_with_its_head_in_the_token_log(pipeline, model, tmp_path):
    """The engine's likeliest tokens reach the loss and the log: masses add up, and the sampled token has
    its place in the head once; a method that reads no head asks for none."""
    head = {"methods": ["grpo=ppo", "centering"], "world.engine.head": 8, "training.steps": 2}
    spec = run_spec(model, "1", "centering", **head, **LOGGED)
    assert (spec.head, run_spec(model, "1", "grpo", **head).head) == (8, 0)
    rows = list(pipeline(spec, tmp_path / "run"))
    assert all(row["centered"] > 0 and 0 < row["head_mass"] < 1 for row in rows)
    logged = pl.read_parquet(tmp_path / "run" / "token_log" / "step_00000000.parquet")
    names = ("top_token_ids", "top_logprobs", "top_rollout_logprobs")
    ids, pi, mu = (logged[name].explode().to_numpy() for name in names)
    own, sampled = (logged[x].explode().to_numpy() for x in ("rollout_logprobs", "token_ids"))
    assert ids.shape == pi.shape == mu.shape == (len(sampled), 8)
    itself = ids < 0
    assert (itself == np.isneginf(pi)).all()
    assert (itself == np.isneginf(mu)).all()
    assert itself.any()
    assert (itself.sum(1) <= 1).all()
    assert not (ids == sampled[:, None]).any()
    filled = np.where(itself, own[:, None], mu)
    assert (np.diff(filled, axis=1) <= 1e-6).all()  # the likeliest first
    gap = np.abs(np.where(itself, 0, pi) - np.where(itself, 0, mu)).max()
    assert gap < 1e-3  # the first weights in two engines
    with pytest.raises(ConfigError, match=r"centering: topk needs .* set world\.engine\.head"):
        run_spec(model, "1", "centering", **(head | {"world.engine.head": 0}))


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        ("ppo+icepop:low=0.5,high=5+keep:level=prefix,min=0.01", {}),
        ("dppo+contract", {"training.proximal": "mu", "world.trainer.grad_cosine": True}),
        ("tis", {"training.proximal": "mu"}),
        ("estr:source=trainer", {}),
    ],
)
def test_compositions_bypass_and_estr(pipeline, model, tmp_path, spec, more):
    """Two steps each on one engine: finite losses, tokens with a gradient, and mu in the place of prox."""
    settings = {"methods": ["grpo=ppo", f"x={spec}"], "training.steps": 2} | more
    rows = list(pipeline(run_spec(model, "1", "x", **settings), tmp_path / "run"))
    assert [row["step"] for row in rows] == [0, 1]
    assert all(np.isfinite(row["loss"]) and row["updated"] for row in rows)
    assert any(row["active"] > 0 for row in rows)
    if "world.trainer.grad_cosine" in more:
        assert [row["grad_cosine"] is None for row in read(tmp_path / "run" / "metrics.jsonl")] == [
            True,
            False,
        ]
    if spec == "tis":
        assert all(row["capped"] == 0 for row in rows)  # k = mu/mu is 1
