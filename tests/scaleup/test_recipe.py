"""Recipes of real engines: all but their [world] is a configuration of `simlab compare`."""

import tomllib
from pathlib import Path

import pytest

from scaleup.recipe import RECIPES, RunSpec, differs, load
from simlab.config import Config, ConfigError
from simlab.specs import regime
from simlab.stabilizers import STABILIZERS, ppo

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


BAD = {
    "key": ({"world.promts": 4}, "world.promts: "),
    "section": ({"training.lr.x": 4}, "training.lr.x: lr is not a section"),
    "method": ({"methods": ["sta"]}, "sta"),
    "lag": ({"lags": ["interval"]}, "interval"),
    "optimizer": ({"training.optimizer": "sgd"}, "must be adam"),
    "distribution": ({"methods": ["grpo=ppo", "estr:tau=1"]}, "needs the whole distribution"),
    "proximal": ({"training.proximal": "rollout"}, "proximal rollout needs"),
    "replay": ({"world.replay": ["r4"]}, "r4"),
    "task": ({"world.task": "resdue"}, "world.task: no task 'resdue'; there are"),
    "ranks": ({"world.trainer.ranks": 3, "world.trainer.tp": 2}, "3 ranks cannot be shared"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_recipes_are_one_sentence(case):
    """Refused before anything starts, with the field."""
    changes, sentence = BAD[case]
    with pytest.raises((ConfigError, ValueError), match=sentence) as error:
        load("tiny_cpu", changes)
    assert "\n" not in str(error.value)


def test_files_that_are_no_recipe(tmp_path):
    """A name that does not exist says which do; text that is not TOML says where."""
    with pytest.raises(ConfigError, match=r"neither a file nor one of .*tiny_cpu"):
        load("nothing")
    (tmp_path / "x.toml").write_text("a = [")
    with pytest.raises(ConfigError, match=r"x\.toml: is not TOML"):
        load(tmp_path / "x.toml")


def test_names_of_runs_are_folders():
    """Different runs have different names, of characters that every file system takes."""
    recipe = load(
        "tiny_cpu", {"lags": ["1", "interval:n=2,in_flight=0"], "world.replay": ["none", "r3"]}
    )
    names = [cell.name for cell in recipe.cells()]
    assert len(set(names)) == len(names) == 8 * 2 * 2 * 4
    assert all(set(name) & set("/:=, ") == set() for name in names)


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
        return recipe.cells()[1].fixed()

    before = fixed()
    machines = {"world__trainer__ranks": 2, "world__trainer__tp": 2, "world__engine__count": 3}
    assert differs(before, fixed(**machines)) is None
    assert differs(before, fixed(world__trainer__dtype="bfloat16")) == "world.trainer.dtype"
    assert differs(before, fixed(training__kl_coef=1e-3)) == "training.kl_coef"
    del STABILIZERS["soft"]
    file.write_text(own + "# edited\n")
    assert differs(before, fixed()) == "method_code"
    del STABILIZERS["soft"]
