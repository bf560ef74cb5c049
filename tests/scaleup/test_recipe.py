"""Recipes of real engines: all but their [world] is a configuration of `simlab compare`."""

import re
import tomllib
from pathlib import Path

import pytest

from scaleup.__main__ import main
from scaleup.commands import Plan, read
from scaleup.recipe import RECIPES, RunSpec, differs, load
from simlab.simulator.config import Config
from simlab.stabilizers import STABILIZERS, ppo
from simlab.study.folder import claimed
from simlab.study.settings import RunError
from simlab.study.specs import regime
from simlab.study.strict import ConfigError

NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_without_its_world_runs_in_the_simulator(name):
    """The same keys, the same methods, arguments, lags and training: only the world differs."""
    recipe = load(name)
    shared = recipe.model_dump(exclude={"world"})
    config = Config(**shared)
    assert config.model_dump(include=set(shared)) == shared
    assert config.arms == recipe.arms
    assert [regime(lag) for lag in config.lags] == [spec.regime for spec in by_lag(recipe)]


def by_lag(recipe):
    """A run at each lag."""
    arm, replay = recipe.arms[0], recipe.world.replay[0]
    return [RunSpec(recipe.world, recipe.training, arm, x, replay, 0) for x in recipe.lags]


def test_a_base_is_changed_key_by_key():
    """A recipe on a base keeps what it does not name, in every section."""
    base, over = load("qwen3_30b_a3b"), load("qwen3_30b_a3b_32gpu")
    assert over.training == base.training
    assert over.world.trainer.tokens == base.world.trainer.tokens
    assert over.world.trainer.ranks == 16
    assert load("tiny_cpu", {"world.engine.count": 3}).world.engine.count == 3


EXAM = {"world.evaluate_every": 2}
MISTAKES = [
    ({"world.promts": 4}, "world.promts: there is no such setting; did you mean world.prompts?"),
    (
        {"world.engine.dtypes": "float32"},
        "world.engine.dtypes: there is no such setting; did you mean world.engine.dtype?",
    ),
    ({"world.prompts": 0}, "world.prompts: Input should be greater than or equal to 1"),
    ({"training.lr.x": 4}, "training.lr.x: lr is not a section"),
    ({"methods": ["grpo=ppo", "satt"]}, "no stabilizer 'satt'"),
    ({"methods": ["grpo=ppo", "estr:tau=1"]}, "needs the whole distribution of the engine"),
    ({"training.proximal": "ewma"}, "proximal ewma runs in the simulator only"),
    ({"training.proximal": "rollout"}, "keep_weights"),
    ({"training.layer_clip": 2.0}, "training.layer_clip runs in the simulator only"),
    *(
        (
            {"world.trainer.quantile": "ema", "methods": ["grpo=ppo", x]},
            f"{x}: quantile ema averages",
        )
        for x in ("oapl", "gepo", "asymre")
    ),
    ({"training.optimizer": "sgd"}, "training.optimizer must be adam"),
    ({"lags": ["two"]}, "no lag regime 'two'"),
    ({"lags": ["interval"]}, "lag 'interval': missing a required argument: 'n'"),
    ({"world.replay": "r4"}, "no replay 'r4'"),
    ({"world.replay": "r3", "lags": ["fully_async:max_age=2"]}, "replay r3 at lag fully_async"),
    ({"world.task": "resdue"}, "world.task: no task 'resdue'; there are"),
    ({"world.replay": ["none", "none"]}, "world: replay: an entry is given twice"),
    ({"world.task_options": {"k": 2}}, "task residue: got an unexpected keyword argument 'k'"),
    ({"world.task_options": {"seed": 2}}, "task residue: seed is not an option, the run sets it"),
    ({"world.task": "reasoning_gym"}, "task reasoning_gym: missing a required argument: 'dataset'"),
    ({"world.trainer.optimizer_offload": True}, "moves Adam off a GPU: gpus_per_node is 0"),
    ({"world.engine.timeout": float("inf")}, "world.engine.timeout: Input should be less"),
    ({"world.engine.options.context_length": "32k"}, "context_length must be a whole number"),
    ({"world.engine.options.mem_fraction_static": 5}, "mem_fraction_static must lie in (0, 1)"),
    (
        {"world.engine.options.mem_fraction_statc": 0.5},
        "no such server argument; did you mean mem_fraction_static?",
    ),
    ({"world.engine.options.schedule_policy": 3}, "options.schedule_policy must be str, got 3"),
    ({"world.engine.options.page_size": True}, "options.page_size must be int, got True"),
    ({"world.engine.options.tp_size": 2}, "options.tp_size is set by world.engine.tp"),
    ({"method_file": "x.py"}, "method_file: must be a list"),
    ({"world": 3}, "world: must be a section with settings of its own"),
    ({"world.host_gb": 0}, "world.host_gb: Input should be greater than 0"),
    (
        {"methods": ["grpo=ppo", "a/b=sat", "a-b=sat"]},
        "two runs would share the folder a-b_lag1_none_seed0",
    ),
    ({"world.trainer.tp": 2}, "1 ranks cannot be shared by tp 2 x pp 1"),
    ({"world.trainer.ranks": 3, "world.trainer.tp": 2}, "3 ranks cannot be shared"),
    (EXAM, "evaluate_every needs an evaluation"),
    (EXAM | {"world.evaluation": {"task": "residue"}}, "world.evaluation.problems: is missing"),
    (
        EXAM | {"world.evaluation": {"task": "math", "problems": 1, "samples": 1}},
        "world.evaluation: task math: missing a required argument: 'files'",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), MISTAKES, ids=[s for _, s in MISTAKES])
def test_recipe_mistakes(change, sentence):
    """An impossible setting is one sentence with its field, before anything starts."""
    with pytest.raises(ConfigError, match=re.escape(sentence)) as error:
        load("tiny_cpu", change)
    assert "\n" not in str(error.value)


COMMANDS = [
    (["plna"], "no command 'plna'; there are plan, run, compare"),
    (["plan", "nothing"], "no recipe 'nothing': neither a file nor one of"),
    (["plan", "tiny_cpu", "--set", "seeds"], "--set 'seeds' is not section.name=value"),
    (
        ["plan", "tiny_cpu", "--set", "world.model=tiny:kind=qwen3_moe,hidden_size=big"],
        "world.model: tiny:kind=qwen3_moe,hidden_size=big: tiny: hidden_size must be a whole number",
    ),
    (["run", "tiny_cpu", "--method", "x"], "--method 'x' is not among grpo, gspo"),
    (["run", "tiny_cpu", "--lag", "two"], "--lag two: no lag regime 'two'; there are"),
    (
        ["compare", "tiny_cpu", "--set", "seeds=1"],
        "tiny_cpu.toml with --set seeds=1: seeds: Input should be greater",
    ),
    (["run", "tiny_cpu", "--seed", "-1"], "seed: Input should be greater than or equal to 0"),
    (["run", "tiny_cpu", "--seed", "x"], "Error parsing --seed"),
    (["run", "tiny_cpu", "--metod", "ppo"], "Unrecognized options: --metod"),
    (["run", "tiny_cpu", "--out", "/proc/x"], "/proc/x: cannot be written"),
    (["run", "tiny_cpu", "--out", "scaleup"], "scaleup: holds __init__.py, which no run wrote"),
    (["compare", "tiny_cpu", "--out", "README.md"], "README.md: cannot be written"),
    (["run", "tiny_cpu", "--set", "world.model=/no/such"], "/no/such holds no config.json"),
    (["plan", "/dev/zero"], "/dev/zero: cannot be read as TOML (it is a device)"),
]


@pytest.mark.parametrize(("words", "sentence"), COMMANDS, ids=[s for _, s in COMMANDS])
def test_command_mistakes(capsys, words, sentence, monkeypatch):
    """One sentence on stderr and exit code 2, before anything starts."""
    monkeypatch.setattr("scaleup.run.cluster.cluster", lambda _: pytest.fail("engines start"))
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith("scaleup: ")
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "127.0.0.1:99999"])
def test_a_dead_ray_address_is_a_sentence_at_once(monkeypatch, address):
    """Ray itself would wait for minutes."""
    from scaleup.run.cluster import cluster

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked"))
    world, says = load("tiny_cpu").world, f"^RAY_ADDRESS {address}: nothing answers there"
    with pytest.raises(RunError, match=says), cluster(world):
        pass


def test_a_run_folder_has_one_command_at_a_time(tmp_path, capsys):
    """`scaleup run` and `scaleup compare` on a folder that a command works in."""
    for command, mark in (("run", "settings.json"), ("compare", "recipe.toml")):
        with claimed(tmp_path, (mark,)), pytest.raises(SystemExit) as stop:
            main([command, "tiny_cpu", "--out", str(tmp_path)])
        assert stop.value.code == 2
        assert f"{tmp_path}: another command is running in it" in capsys.readouterr().err


def test_words_of_a_change(capsys):
    """TOML, Python's True and False, and otherwise a text."""
    words = ["world.engine.options.disable_radix_cache=False", "world.model=a b", "seeds=3"]
    recipe = read(Plan(recipe="tiny_cpu", set=words))
    assert recipe.world.engine.options["disable_radix_cache"] is False
    assert (recipe.world.model, recipe.seeds) == ("a b", 3)


def test_a_recipe_on_another(tmp_path):
    """A file builds on a recipe; changes go by dotted names and keep what they do not name."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "tiny_cpu"\nlags = ["4"]\n[training]\nsteps = 7\n')
    recipe = load(path, {"world.engine.count": 2, "world.prompts": 3})
    assert (recipe.lags, recipe.training.steps, recipe.training.lr) == (("4",), 7, 3e-3)
    assert (recipe.world.engine.count, recipe.world.prompts) == (2, 3)
    assert recipe.world.engine.options["disable_radix_cache"] is True  # of the base
    (tmp_path / "other.toml").write_text('base = "mine.toml"\nseeds = 9\n')  # beside it
    assert (load(tmp_path / "other.toml").lags, load(tmp_path / "other.toml").seeds) == (("4",), 9)
    path.write_text('base = "other.toml"\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: is its own base, by way of other\.toml"):
        load(path)
    path.write_text("base = 3\n")
    with pytest.raises(ConfigError, match="base must be the name of a recipe, got 3"):
        load(path)


def test_files_that_are_no_recipe(tmp_path):
    """A name that does not exist says which do; text that is not TOML says where."""
    with pytest.raises(ConfigError, match=r"neither a file nor one of .*tiny_cpu"):
        load("nothing")
    (tmp_path / "x.toml").write_text("a = [")
    with pytest.raises(ConfigError, match=r"x\.toml: cannot be read as TOML"):
        load(tmp_path / "x.toml")


def test_names_of_runs_are_folders():
    """Different runs have different names, of characters that every file system takes."""
    recipe = load(
        "tiny_cpu", {"lags": ["1", "interval:n=2,in_flight=0"], "world.replay": ["none", "r3"]}
    )
    names = [cell.name for cell in recipe.cells()]
    assert len(set(names)) == len(names) == (10 * 2 + 3) * 2 * 4
    assert all(set(name) & set("/:=, ") == set() for name in names)
    odd = load("tiny_cpu", {"methods": ["mine/sat=sat"], "reference": "mine/sat", "lags": ["1"]})
    assert odd.cells()[0].name == "mine-sat_lag1_none_seed0"


def test_recipes_are_plain_toml():
    """Every file names its world and its methods, or the recipe that it is based on."""
    for name in NAMES:
        held = tomllib.loads((RECIPES / f"{name}.toml").read_text())
        assert "base" in held or {"methods", "lags", "training", "world"} <= held.keys()


def test_what_makes_a_run(tmp_path):
    """The code of a method, not the path of its file; no machine; every number of the training."""
    file = tmp_path / "soft.py"
    own = (Path(ppo.__file__).read_text()).replace("PPO", "Soft", 1)
    file.write_text(own)
    few = {"methods": ["grpo=ppo"], "method_file": [str(file)]}

    def fixed(**changes):
        recipe = load("tiny_cpu", few | {k.replace("__", "."): v for k, v in changes.items()})
        return next(x for x in recipe.cells() if x.arm.name == "soft").fixed()

    before = fixed()
    machines = {"world__trainer__ranks": 2, "world__trainer__tp": 2, "world__engine__count": 3}
    assert differs(before, fixed(**machines)) is None
    assert differs(before, fixed(world__trainer__dtype="bfloat16")) == "world.trainer.dtype"
    assert differs(before, fixed(training__kl_coef=1e-3)) == "training.kl_coef"
    # the room for a prompt says which problems there are, and so which number each has
    assert differs(before, fixed(world__engine__options={"context_length": 64})) == "context"
    assert differs(before, fixed(world__engine__options={"log_level": "info"})) is None
    file.write_text(own + "# edited\n")
    assert differs(before, fixed()) == "method_code"
    file.write_text(own)
    median = tmp_path / "median.py"
    code = "(reward - reward.nanmedian(-1, keepdim=True).values).nan_to_num(0.0)"
    median.write_text(f"def advantage(reward, length):\n    return {code}\n")
    assert differs(before, fixed(training__advantage_file=str(median))) == "advantage_code"
    with pytest.raises(ConfigError, match=r"advantage dr_grpo and advantage_file"):
        fixed(training__advantage_file=str(median), training__advantage="dr_grpo")
    del STABILIZERS["soft"]
