"""What a comparison is: typed settings with defaults, checked before anything is written.

The same keys stand in TOML files, on the command line and in every run folder. The defaults are
experiment E1; other experiments say only what they change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from simlab.advantages import ADVANTAGES
from simlab.aggregate import AGGREGATIONS
from simlab.arguments import check_name
from simlab.contract import check
from simlab.kl import KL
from simlab.noise import NOISES, Noise
from simlab.policies import POLICIES
from simlab.specs import named, parse, regime
from simlab.stabilizers import Stabilizer, bind, load, needs
from simlab.tasks import TASKS

METHODS = (
    "none",
    "pg",
    "ppo",
    "ppo-.12=ppo:eps_low=0.12,eps_high=0.12",
    "ppo-.05=ppo:eps_low=0.05,eps_high=0.05",
    "ppo-dual=ppo:dual_clip=3",
    "sat",
    "dppo",
    "icepop",
    "kpop",
    "tis",
    "gspo",
    "placebo-eps=ppo:eps_low=0.2001,eps_high=0.2001",
    "placebo-draws=ppo@1",
)
SEEDS_PER_CELL = 48  # lanes of one program; more would not be faster
LARGEST = 1 << 22  # numbers in one table of a cell: 17 MB in float32, some thirty live at a time


class ConfigError(Exception):
    """Settings that cannot be; the message is one sentence that names the field."""


class RunError(Exception):
    """A run that cannot go on; its message is one sentence for the user."""


class Strict(BaseModel):
    """Immutable, unknown keys are errors, and an error is a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data):
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError("; ".join(_sentence(e) for e in error.errors())) from error

    __init__.__pydantic_base_init__ = True  # sections within sections: errors keep their whole path


def _sentence(error: dict) -> str:
    where = ".".join(str(part) for part in error["loc"])
    message = f"{where}: " * bool(where) + error["msg"].removeprefix("Value error, ")
    whole = isinstance(error["input"], BaseModel | dict)  # a section with all its keys
    return message if whole else f"{message} (got {error['input']!r})"


class WorldSpec(Strict):
    """The token MDP and the policy that acts in it."""

    task: str = "health"
    """Token MDP: health, needle, modsum or tree."""
    policy: str = "moe"
    """Policy: moe, linear or tabular."""
    prompts: Annotated[int, Field(ge=1, le=512)] = 8
    """Prompts, all of them in every batch."""
    horizon: Annotated[int, Field(ge=1, le=512)] = 10
    """Tokens per answer."""
    vocab: Annotated[int, Field(ge=2, le=4096)] = 8
    """Tokens to choose from."""
    answers: Annotated[int, Field(ge=1, le=4096)] = 8
    """Answers per prompt and step (the group)."""
    features: Annotated[int, Field(ge=1, le=4096)] = 24
    """Random features of a state that linear and moe policies see."""
    feature_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Standard deviation of the features; larger means a larger effective learning rate."""

    @model_validator(mode="after")
    def _names(self):
        check_name("task", self.task, TASKS)
        check_name("policy", self.policy, POLICIES)
        if self.largest > LARGEST:
            raise ValueError(
                f"this world needs tables of {self.largest:,} numbers a seed, at most {LARGEST:,} "
                "are allowed; choose a smaller prompts, horizon, vocab or answers"
            )
        return self

    @property
    def largest(self) -> int:
        """Numbers a seed in the largest array: the table [P, T, M, V], or the tokens of a step."""
        states = TASKS[self.task].states(self.horizon, self.vocab)
        return self.prompts * self.horizon * max(states * self.vocab, self.answers)


class Training(Strict):
    """How every arm is trained."""

    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 300
    """Optimizer steps."""
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """Learning rate; 0 is the null run."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd, or adam with betas .9 and .98."""
    grad_clip: Annotated[float, Field(gt=0)] = float("inf")
    """Largest gradient norm; inf does not clip."""
    aggregation: str = "token_mean"
    """How per-token terms become a loss."""
    advantage: str = "grpo"
    """Rewards of a group to advantages."""
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of a KL term to the first policy in the loss; SAT's runs use 1e-3."""
    kl: str = "low_var"
    """Estimator of the KL term."""
    proximal: Literal["rollout", "step", "ewma"] = "rollout"
    """pi_old of methods that read it: the trainer at the rollout's weights, just before the step, or an EWMA of its weights centred in the staleness window. decoupled:proximal=... overrides it for one arm."""
    log_every: Annotated[int, Field(ge=1)] = 7
    """Steps between exact evaluations; coprime with the lags, or some ages are never seen."""

    @model_validator(mode="after")
    def _names(self):
        check_name("aggregation", self.aggregation, AGGREGATIONS)
        check_name("advantage", self.advantage, ADVANTAGES)
        check_name("KL estimator", self.kl, KL)
        return self


class Comparison(Strict):
    """Methods x lags x seeds, whatever the world: what `simlab compare` and `scaleup` share."""

    training: Training = Training()
    methods: tuple[str, ...] = METHODS
    """Arms, each [label=]name[@stream][:argument=value,...]."""
    method_file: tuple[Path, ...] = ()
    """Files with a stabilizer of your own, which join under the name of the file; they are code and run, and must keep the promises of simlab/contract.py."""
    reference: str = "ppo"
    """Label of the arm that the others are compared with, seed by seed."""
    lags: tuple[str, ...] = ("1", "4", "8", "24")
    """Lag regimes: a number n of optimizer steps per weight broadcast with one window of rollouts in flight, 0 for synchronous, or name:argument=value,... such as interval:n=8,in_flight=0 or fully_async:max_age=8."""
    seeds: Annotated[int, Field(ge=2, le=100_000)] = 24
    """Paired seeds, 0 to seeds - 1."""

    @field_validator("lags", mode="before")
    @classmethod
    def _numbers_are_names(cls, value):
        many = value if isinstance(value, (list, tuple)) else [value]
        return tuple(str(x) if isinstance(x, int) else x for x in many)

    @field_validator("methods", "lags")
    @classmethod
    def _some(cls, value, info):
        if not value:
            raise ValueError("at least one is needed")
        if len(set(value)) < len(value):
            raise ValueError("an entry is given twice")
        return value

    @model_validator(mode="after")
    def _consistent(self):
        if len({regime(spec) for spec in self.lags}) < len(self.lags):
            raise ValueError(f"two lags are the same regime ({', '.join(self.lags)})")
        for arm in self.arms:
            if arm.file is not None:
                check(arm.stabilizer)
        labels = [arm.label for arm in self.arms]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two methods have the same label ({', '.join(labels)})")
        if self.reference not in labels:
            raise ValueError(f"reference {self.reference!r} is not among {', '.join(labels)}")
        return self

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """The methods, parsed and bound."""
        files = {load(path): str(path) for path in self.method_file}
        named = [Arm.parse(spec) for spec in self.methods]
        named += [Arm.parse(name) for name in files if name not in {arm.name for arm in named}]
        return tuple(replace(arm, file=files.get(arm.name)) for arm in named)

    @property
    def placebos(self) -> list[str]:
        """Labels of arms that run the reference's own method and say that they change nothing else."""
        method = {arm.label: arm.name for arm in self.arms}
        own = method[self.reference]
        return [x for x in method if x.startswith("placebo") and method[x] == own]


class Config(Comparison):
    """One comparison of `simlab compare`, in one world."""

    world: WorldSpec = WorldSpec()
    noise: tuple[str, ...] = ("grid", "router:scale=0.05", "gaussian:scale=0.05")
    """Engine noise, applied together, each name[:argument=value,...]; none at all if empty."""
    noise_from: Path | None = None
    """A log of trainer and rollout log-probs to resample the noise from; replaces noise."""

    @model_validator(mode="after")
    def _router(self):
        router = [n.name for n in self.noises if hasattr(NOISES[n.name], "router")]
        if router and (policy := self.world.policy) != "moe":
            raise ValueError(f"noise {router[0]} needs a policy with a router (moe), not {policy}")
        return self

    @cached_property
    def noises(self) -> tuple[Noise, ...]:
        """The noise models, parsed; the log of `noise_from` has been read once."""
        if self.noise_from is not None:
            return (Noise("replay", {"path": str(self.noise_from)}),)
        return tuple(Noise(*named(spec)) for spec in self.noise)

    def cells(self) -> list[Cell]:
        """Units of work, the reference first, in blocks of seeds."""
        size = max(min(SEEDS_PER_CELL, LARGEST // self.world.largest), 1)
        blocks = [tuple(range(i, min(i + size, self.seeds))) for i in range(0, self.seeds, size)]
        arms = sorted(self.arms, key=lambda arm: arm.label != self.reference)
        return [
            Cell(self.world, self.training, arm, lag, self.noises, seeds)
            for seeds in blocks
            for arm in arms
            for lag in self.lags
        ]


@dataclass(frozen=True)
class Arm:
    """A stabilizer with arguments under a label; `stream` picks independent sampling draws."""

    label: str
    name: str
    arguments: tuple[tuple[str, object], ...] = ()
    stream: int = 0
    file: str | None = None  # of a user's own stabilizer

    @classmethod
    def parse(cls, spec: str) -> Arm:
        """From `[label=]name[@stream][:argument=value,...]`; raises ValueError in one sentence."""
        label, name, stream, arguments = parse(spec)
        arm = cls(label, name, tuple(sorted(arguments.items())), stream)
        bind(name, **arguments)
        return arm

    @property
    def stabilizer(self) -> Stabilizer:
        """The registry's function with these arguments."""
        if self.file is not None:
            load(Path(self.file))  # a worker process has not seen it yet
        return bind(self.name, **dict(self.arguments))

    def proximal(self, how: Training) -> str | None:
        """Which pi_old the method reads: its own argument before the training's; None if it reads none."""
        if "logp_prox" not in needs(stabilizer := self.stabilizer):
            return None
        own = stabilizer.arguments.get("proximal", "batch")
        return how.proximal if own == "batch" else own


@dataclass(frozen=True)
class Cell:
    """One arm at one lag over one block of seeds: what a worker runs and a resumed run skips."""

    world: WorldSpec
    training: Training
    arm: Arm
    lag: str
    noise: tuple[Noise, ...]
    seeds: tuple[int, ...]

    def key(self, code: str) -> str:
        """A name that changes when the numbers could: settings, the log's content, a digest of the code."""
        logs = [Path(n.arguments["path"]) for n in self.noise if n.name == "replay"]
        logs += [Path(self.arm.file)] if self.arm.file else []
        content = [hashlib.sha256(path.read_bytes()).hexdigest() for path in logs]
        text = f"{code} {content} {self!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
