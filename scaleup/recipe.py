"""A recipe: what is trained, where, by which methods at which lags. TOML with the keys of `simlab compare`.

    methods, method_file, reference, lags, seeds, [training]     as in the simulator, word for word
    [world]                                                      a model, a task, engines (world.py)

`scaleup plan`, `scaleup run` and `scaleup compare` take the name of a file in scaleup/recipes or a path.
Every setting is checked before anything is started; unknown keys are errors.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import model_validator

from scaleup.world import EngineWorld
from simlab.core.tokens import TOP
from simlab.lag import Regime
from simlab.stabilizers import check_average, needs
from simlab.study.arms import Arm
from simlab.study.folder import read_toml
from simlab.study.settings import Comparison, Training
from simlab.study.specs import regime
from simlab.study.strict import ConfigError

RECIPES = Path(__file__).parent / "recipes"
# What may differ when a run resumes: how often it writes, how long it waits, what it runs on. The layout
# changes the last bits of a log-prob, as another machine would; for a user's file its code counts, not its path.
MAY_CHANGE = (
    *("world.checkpoint_every", "world.token_log_every", "training.log_every", "method_file"),
    "training.advantage_file",
    *("world.gpus_per_node", "world.gpu_gb", "world.host_gb", "world.shm_gb"),
    *(f"world.engine.{name}" for name in ("count", "tp", "timeout", "restarts", "options")),
    *(f"world.trainer.{name}" for name in ("ranks", "tp", "pp", "ep", "tokens", "recompute")),
    "world.trainer.optimizer_offload",
)


class Recipe(Comparison):
    """A comparison on real engines. The settings outside of `world` are those of the simulator."""

    world: EngineWorld

    @model_validator(mode="after")
    def _trainable(self):
        training, world = self.training, self.world
        if training.optimizer != "adam":
            raise ValueError(
                "training.optimizer must be adam: Megatron's trainer here has no other"
            )
        if training.layer_clip != math.inf:
            raise ValueError(
                "training.layer_clip runs in the simulator only: Megatron's optimizer clips the norm of all "
                "layers together; leave it at inf, or set training.grad_clip"
            )
        for arm in self.arms:
            proximal = arm.proximal(training.proximal)
            if proximal == "ewma":
                raise ValueError(f"{arm.label}: proximal ewma runs in the simulator only")
            if proximal == "rollout" and not world.trainer.keep_weights:
                raise ValueError(
                    f"{arm.label}: proximal rollout needs world.trainer.keep_weights, "
                    'or choose proximal = "step"'
                )
            if world.trainer.quantile == "ema":
                check_average(arm.stabilizer)
            wanted = set(needs(arm.stabilizer))
            if lacking := wanted & {"tv", "entropy_mu", "gini_mu"}:
                raise ValueError(
                    f"{arm.label}: {min(lacking)} needs the whole distribution of the engine"
                )
            if wanted & {*TOP} and not world.engine.head:
                raise ValueError(
                    f"{arm.label}: topk needs the log-probs of the engine's likeliest tokens; set "
                    "world.engine.head, to 32 say"
                )
        names = [cell.name for cell in self.cells()]  # each run checks itself
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two runs would share the folder {twice}; give other labels")
        return self

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Within what arms are compared: every lag and replay."""
        return {"lag": self.lags, "replay": self.world.replay}

    @property
    def head(self) -> int:
        """How many likeliest tokens the engine returns for the arm that reads most."""
        return max(head_of(self.world, arm) for arm in self.arms)

    def cells(self) -> list[RunSpec]:
        """Runs of `scaleup compare`, the reference first, seed by seed."""
        return [
            RunSpec(self.world, self.training, arm, lag, replay, seed)
            for seed in range(self.seeds)
            for replay in self.world.replay
            for arm, lag in self.plan
        ]


def head_of(world: EngineWorld, arm: Arm) -> int:
    """How many likeliest tokens come with a sampled one of this arm."""
    return world.engine.head if "topk_mu" in needs(arm.stabilizer) else 0


@dataclass(frozen=True)
class RunSpec:
    """One run: one method, lag, replay and seed of a recipe. Raises ValueError for r3 with prefills under new weights."""

    world: EngineWorld
    training: Training
    arm: Arm
    lag: str
    replay: str
    seed: int

    def __post_init__(self):
        lag = self.regime
        if self.replay == "r3" and lag.on_broadcast == "retract" and lag.largest_age:
            raise ValueError(
                f"replay r3 at lag {self.lag}: a response that goes on under new weights is prefilled again, "
                "and the engine then names the new experts for its old tokens"
            )

    @property
    def regime(self) -> Regime:
        """The lag regime: the object that decides in the simulator too."""
        return regime(self.lag)

    @property
    def head(self) -> int:
        """How many likeliest tokens the engine returns beside each sampled one; 0 where nothing reads them."""
        return head_of(self.world, self.arm)

    @property
    def name(self) -> str:
        """A folder name."""
        words = (self.arm.label, f"lag{self.lag}", self.replay, f"seed{self.seed}")
        return "_".join(re.sub(r"[^\w.+-]", "-", word) for word in words)

    def settings(self) -> dict:
        """What the run is, as JSON holds it."""
        settings = {
            "world": self.world.model_dump(mode="json") | {"replay": self.replay},
            "training": self.training.model_dump(mode="json"),
            "method": self.arm.name,
            "label": self.arm.label,
            "arguments": dict(self.arm.arguments),
            "stream": self.arm.stream,
            "method_file": self.arm.file,
            "method_code": self.arm.code,
            "advantage_code": self.training.advantage_code,
            "lag": self.lag,
            "seed": self.seed,
        }
        return json.loads(json.dumps(settings, default=str))

    def fixed(self) -> dict:
        """Settings that a run keeps when it resumes: all but those of MAY_CHANGE.

        Of the engine's options the context length is kept, which says how long a prompt may be.
        """
        settings = self.settings()
        settings["context"] = self.world.engine.options.get("context_length")
        for name in MAY_CHANGE:
            *parents, last = name.split(".")
            table = settings
            for parent in parents:
                table = table[parent]
            del table[last]
        return settings


def differs(recorded: dict, wanted: dict) -> str | None:
    """Dotted name of the first setting that differs."""
    for name in recorded | wanted:
        one, two = recorded.get(name), wanted.get(name)
        if one != two:
            both = isinstance(one, dict) and isinstance(two, dict)
            return f"{name}.{differs(one, two)}" if both else name
    return None


def load(recipe: str | Path, changes: dict | None = None) -> Recipe:
    """A recipe by name or path, with `changes` of single settings by dotted name.

    A recipe may build on another: `base = "name"`. Raises ConfigError in one sentence.
    """
    tables = _tables(recipe, changes or {})
    try:
        return Recipe(**tables)
    except ConfigError as error:
        words = "".join(f" --set {name}={value}" for name, value in (changes or {}).items())
        raise ConfigError(f"{_path(recipe)}{' with' * bool(words)}{words}: {error}") from error


def _path(recipe: str | Path) -> Path:
    known = RECIPES / f"{recipe}.toml"
    return known if known.exists() else Path(recipe)


def _tables(recipe: str | Path, changes: dict, over: tuple[Path, ...] = ()) -> dict:
    path = _path(recipe)
    if over and not path.exists():
        path = over[-1].parent / path  # a base beside the file that names it
    if path.resolve() in over:
        raise ConfigError(f"{path}: is its own base, by way of {over[-1].name}")
    if not path.is_file() and not path.is_char_device():  # read_toml refuses a device
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise ConfigError(f"no recipe {str(recipe)!r}: neither a file nor one of {known}")
    try:
        tables = read_toml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if (base := tables.pop("base", None)) is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base must be the name of a recipe, got {base!r}")
        tables = _merged(_tables(base, {}, (*over, path.resolve())), tables)
    for name, value in changes.items():
        *parents, last = name.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name}: {parent} is not a section")
        table[last] = value
    return tables


def _merged(under: dict, over: dict) -> dict:
    both = {k: _merged(under[k], v) for k, v in over.items() if isinstance(v, dict) and k in under}
    return under | over | both
