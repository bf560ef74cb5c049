"""A recipe: what is trained, where, by which methods at which lags. TOML with the keys of `simlab compare`.

    methods, method_file, reference, lags, seeds, [training]     as in the simulator, word for word
    [world]                                                      what differs: a model, a task, engines

`scaleup plan`, `scaleup run` and `scaleup compare` take the name of a file in scaleup/recipes or a path.
Every setting is checked before anything is started; unknown keys are errors.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from scaleup import QUANTILES, REPLAYS
from scaleup.tasks import TASKS, check_options
from simlab.arguments import check_name
from simlab.config import Arm, Comparison, ConfigError, Strict, Training
from simlab.specs import named, regime
from simlab.stabilizers import needs

RECIPES = Path(__file__).parent / "recipes"
# Of a run that goes on: how often it writes, how long it waits, what it runs on. The layout moves the
# last bits of a log-prob, as another machine would; the code of a method file stands beside its path.
MAY_CHANGE = (
    *("world.checkpoint_every", "world.token_log_every", "training.log_every", "method_file"),
    *("world.gpus_per_node", "world.gpu_gb"),
    *(f"world.engine.{name}" for name in ("count", "tp", "timeout", "restarts", "options")),
    *(f"world.trainer.{name}" for name in ("ranks", "tp", "pp", "ep", "tokens", "recompute")),
    "world.trainer.optimizer_offload",
)
Count = Annotated[int, Field(ge=1)]
Type = Literal["float32", "bfloat16"]


class EngineSpec(Strict):
    """The rollout pool."""

    dtype: Type = "bfloat16"
    """Of SGLang's weights."""
    count: Count = 1
    """Engines; a prompt goes to the one with the fewest answers in flight."""
    tp: Count = 1
    """GPUs of one engine."""
    deterministic: bool = False
    """A seed for every answer, so that the same weights give the same tokens; slower on a GPU."""
    exact: bool = True
    """Compare a checksum of every pushed weight; False where a GPU kernel shuffles them."""
    timeout: Annotated[float, Field(gt=0, le=1e8)] = 600.0
    """Seconds after which a call without an end, or an engine of whose answers none ends, is given up."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """Engines that may be started anew in one run."""
    options: dict[str, str | int | float | bool] = Field(default={})
    """More of SGLang's server arguments."""

    @model_validator(mode="after")
    def _read_here(self):
        for name in ("context_length", "max_total_tokens", "max_running_requests"):
            if not (type(x := self.options.get(name, 1)) is int and x > 0):
                raise ValueError(f"options.{name} must be a whole number above 0, got {x!r}")
        share = self.options.get("mem_fraction_static", 0.5)
        if isinstance(share, str | bool) or not 0 < share < 1:
            raise ValueError(f"options.mem_fraction_static must lie in (0, 1), got {share!r}")
        return self


class TrainerSpec(Strict):
    """The trainer group."""

    dtype: Type = "bfloat16"
    """Of the weights; master weights and gradients are float32."""
    ranks: Count = 1
    """Processes, one GPU each; what tp and pp leave is data parallel."""
    tp: Count = 1
    """Tensor parallel, with sequence parallelism where above 1."""
    pp: Count = 1
    """Pipeline stages."""
    ep: Count = 1
    """Expert parallel."""
    tokens: Count = 32_768
    """Tokens of a micro-batch, at most, unless one response is longer."""
    recompute: bool = False
    """Recompute activations in the backward pass."""
    optimizer_offload: bool = False
    """Adam, its float32 weights and its moments on the host; needs a GPU."""
    quantile: str = "each_step"
    """When whole-batch numbers are found: each_step, ema or local."""
    keep_weights: bool = False
    """Keep the weights of every version in use, on the CPU: splits d into policy and engine, and `proximal = "rollout"` works."""

    @model_validator(mode="after")
    def _fits(self):
        one_step = [x for x in QUANTILES if x != "pre_step"]  # a batch has no second step
        check_name("quantile", self.quantile, one_step)
        if self.ranks % (self.tp * self.pp):
            raise ValueError(f"{self.ranks} ranks cannot be shared by tp {self.tp} x pp {self.pp}")
        if (self.ranks // self.pp) % self.ep:
            raise ValueError(f"{self.ranks} ranks cannot be shared by ep {self.ep}")
        return self


def _task(name: str) -> str:
    check_name("task", name, TASKS)
    return name


TaskName = Annotated[str, AfterValidator(_task)]


class Evaluation(Strict):
    """Problems that the served weights answer from time to time."""

    task: TaskName
    """residue, reasoning_gym or math."""
    task_options: dict = Field(default={})
    """Arguments of the task."""
    problems: Count
    """The first problems of the task."""
    samples: Count
    """Answers to each (k)."""
    repeats: Count = 1
    """Times that all problems are answered."""

    @model_validator(mode="after")
    def _options(self):
        check_options(self.task, self.task_options)
        return self


class EngineWorld(Strict):
    """A language model, a task, and the machines they run on."""

    model: str
    """A folder with a Hugging Face checkpoint, smollm, or tiny[:kind=...,size=...] (random weights)."""
    task: TaskName
    """residue, reasoning_gym or math."""
    task_options: dict = Field(default={})
    """Arguments of the task."""
    prompts: Count = 16
    """Prompts of a step."""
    answers: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt (the group)."""
    max_new_tokens: Count = 12
    """Tokens of an answer, at most."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Of the sampler and of the trainer's log-probs. There is no truncation: top-p 1, top-k off."""
    replay: tuple[str, ...] = ("none",)
    """Routing replay: none, r2 or r3; `scaleup compare` runs all of them."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """0 runs on the CPU."""
    gpu_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 80.0
    """Memory of a GPU, in 1e9 bytes: 80 (H100) or 141 (H200)."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between checkpoints; 0 keeps none, and a run that is stopped starts anew."""
    token_log_every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between files of the token log; 0 writes none."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between evaluations, which wait for the next push; 0 makes none."""
    evaluation: Evaluation | None = None
    """What is asked in an evaluation."""
    engine: EngineSpec = EngineSpec()
    trainer: TrainerSpec = TrainerSpec()

    @field_validator("replay", mode="before")
    @classmethod
    def _one_or_many(cls, value):
        return (value,) if isinstance(value, str) else tuple(value)

    @property
    def maker(self) -> tuple[str, dict]:
        """Who makes the first weights, with arguments: tiny or smollm; else a folder that holds them."""
        return named(self.model) if ":" in self.model else (self.model, {})

    @model_validator(mode="after")
    def _names(self):
        if not self.replay:
            raise ValueError("replay: at least one is needed")
        if len(set(self.replay)) < len(self.replay):
            raise ValueError("replay: an entry is given twice")
        for name in self.replay:
            check_name("replay", name, REPLAYS)
        check_options(self.task, self.task_options)
        if self.trainer.optimizer_offload and not self.gpus_per_node:
            raise ValueError("trainer.optimizer_offload moves Adam off a GPU: gpus_per_node is 0")
        if self.evaluate_every and self.evaluation is None:
            raise ValueError("evaluate_every needs an evaluation with task, problems and samples")
        return self


class Recipe(Comparison):
    """A comparison on real engines. The settings outside of `world` are those of the simulator."""

    world: EngineWorld

    @model_validator(mode="after")
    def _trainable(self):
        how, world = self.training, self.world
        if how.optimizer != "adam":
            raise ValueError(
                "training.optimizer must be adam: Megatron's trainer here has no other"
            )
        for arm in self.arms:
            proximal = arm.proximal(how)
            if proximal == "ewma":
                raise ValueError(f"{arm.label}: proximal ewma runs in the simulator only")
            if proximal == "rollout" and not world.trainer.keep_weights:
                raise ValueError(
                    f"{arm.label}: proximal rollout needs world.trainer.keep_weights, "
                    'or choose proximal = "step"'
                )
            if odd := set(needs(arm.stabilizer)) & {"tv", "topk", "entropy_mu", "gini_mu"}:
                raise ValueError(
                    f"{arm.label}: {min(odd)} needs the whole distribution of the engine"
                )
        names = [cell.name for cell in self.cells()]  # each run checks itself
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two runs would share the folder {twice}; give other labels")
        return self

    def cells(self) -> list[RunSpec]:
        """Runs of `scaleup compare`, the reference first, seed by seed."""
        arms = sorted(self.arms, key=lambda arm: arm.label != self.reference)
        return [
            RunSpec(self.world, self.training, arm, lag, replay, seed)
            for seed in range(self.seeds)
            for lag in self.lags
            for replay in self.world.replay
            for arm in arms
        ]


@dataclass(frozen=True)
class RunSpec:
    """One run: one method, lag, replay and seed of a recipe. Raises ValueError for what cannot be."""

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
                f"replay r3 at lag {self.lag}: an answer that goes on under new weights is read again, "
                "and the engine then names the new experts for its old tokens"
            )

    @property
    def regime(self):
        """The lag regime: the object that decides in the simulator too."""
        return regime(self.lag)

    @property
    def name(self) -> str:
        """A folder name."""
        words = (self.arm.label, f"lag{self.lag}", self.replay, f"seed{self.seed}")
        return "_".join(re.sub(r"[^\w.+-]", "-", word) for word in words)

    def settings(self) -> dict:
        """What the run is, as JSON holds it."""
        held = {
            "world": self.world.model_dump(mode="json") | {"replay": self.replay},
            "training": self.training.model_dump(mode="json"),
            "method": self.arm.name,
            "label": self.arm.label,
            "arguments": dict(self.arm.arguments),
            "stream": self.arm.stream,
            "method_file": self.arm.file,
            "method_code": self.arm.file and sha256(Path(self.arm.file).read_bytes()).hexdigest(),
            "lag": self.lag,
            "seed": self.seed,
        }
        return json.loads(json.dumps(held, default=str))

    def fixed(self) -> dict:
        """Settings that a run keeps when it goes on: all but those of MAY_CHANGE.

        Of the engine's options the context stays, which says how long a prompt may be.
        """
        held = self.settings()
        held["context"] = self.world.engine.options.get("context_length")
        for name in MAY_CHANGE:
            *parents, last = name.split(".")
            table = held
            for parent in parents:
                table = table[parent]
            del table[last]
        return held


def differs(held: dict, wanted: dict) -> str | None:
    """Dotted name of the first setting that is another."""
    for name in held | wanted:
        one, two = held.get(name), wanted.get(name)
        if one != two:
            both = isinstance(one, dict) and isinstance(two, dict)
            return f"{name}.{differs(one, two)}" if both else name
    return None


def load(recipe: str | Path, changes: dict | None = None) -> Recipe:
    """A recipe by name or path, with `changes` of single settings by dotted name.

    A recipe may build on another: `base = "name"`. Raises ConfigError in one sentence.
    """
    return Recipe(**_tables(recipe, changes or {}))


def _tables(recipe: str | Path, changes: dict, over: tuple[Path, ...] = ()) -> dict:
    path = RECIPES / f"{recipe}.toml" if (RECIPES / f"{recipe}.toml").exists() else Path(recipe)
    if over and not path.exists():
        path = over[-1].parent / path  # a base beside the file that names it
    if path.resolve() in over:
        raise ConfigError(f"{path}: is its own base, by way of {over[-1].name}")
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise ConfigError(
            f"no recipe {str(recipe)!r}: neither a file nor one of {known}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not TOML ({error})") from error
    if (base := found.pop("base", None)) is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base must be the name of a recipe, got {base!r}")
        found = _merged(_tables(base, {}, (*over, path.resolve())), found)
    for name, value in changes.items():
        *parents, last = name.split(".")
        table = found
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name}: {parent} is not a section")
        table[last] = value
    return found


def _merged(under: dict, over: dict) -> dict:
    both = {k: _merged(under[k], v) for k, v in over.items() if isinstance(v, dict) and k in under}
    return under | over | both
