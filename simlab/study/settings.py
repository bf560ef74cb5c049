"""What a comparison is, whatever its world: typed settings with defaults, checked before anything is
written, and the errors a user sees.

The same keys stand in TOML files, on the command line and in every run folder.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from simlab.contract.advantages import check as check_advantage
from simlab.contract.advantages import load as load_advantage
from simlab.contract.advantages import loaded
from simlab.contract.promises import check
from simlab.core.advantages import ADVANTAGES, Advantage
from simlab.core.aggregate import AGGREGATIONS
from simlab.core.arguments import check_name
from simlab.core.kl import KL
from simlab.stabilizers import load
from simlab.study.arms import Arm, user_code
from simlab.study.command_line import UserError
from simlab.study.files import code_of, forget_edited
from simlab.study.specs import parse, regime, written
from simlab.study.strict import Strict

ADVANTAGE = "grpo"  # the default
FLOAT32 = 1e38  # a number that meets float32 tensors is at most this
METHODS = (
    "none", "pg", "ppo", "ppo-0.12=ppo:eps_low=0.12,eps_high=0.12", "ppo-0.05=ppo:eps_low=0.05,eps_high=0.05",
    "ppo-dual=ppo:dual_clip=3", "sat", "dppo", "icepop", "kpop", "tis", "gspo",
)  # fmt: skip


class RunError(UserError):
    """A run that cannot go on; its message is one sentence for the user."""


class Training(Strict):
    """How every arm is trained."""

    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 300
    """Optimizer steps."""
    lr: Annotated[float, Field(ge=0, le=FLOAT32, allow_inf_nan=False)] = 2.0
    """Learning rate; 0 is the null run."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd, or adam with betas 0.9 and 0.98."""
    grad_clip: Annotated[float, Field(gt=0)] = float("inf")
    """Largest gradient norm; inf does not clip."""
    layer_clip: Annotated[float, Field(gt=1)] = float("inf")
    """LayerClip: a layer's gradient norm is at most so many times its mean so far; inf does not clip. Simulator only."""
    aggregation: str = "token_mean"
    """How per-token terms become a loss."""
    advantage: str = ADVANTAGE
    """Rewards of a group to advantages."""
    advantage_file: Path | None = None
    """A file with a function advantage(reward, length) of your own, used in place of `advantage`; it is code and runs, and must keep the promises of simlab/contract/advantages.py."""
    kl_coef: Annotated[float, Field(ge=0, le=FLOAT32, allow_inf_nan=False)] = 0.0
    """Weight of a KL term to the first policy in the loss; SAT's runs use 1e-3."""
    kl: str = "low_var"
    """Estimator of the KL term."""
    proximal: Literal["rollout", "step", "ewma", "mu"] = "rollout"
    """pi_old of methods that read it: the trainer at the rollout's weights, just before the step, an EWMA of its weights centred in the staleness window, or mu, the policy that sampled (bypass). NAME:proximal=... chooses the ratio of one arm, of any method that has one: ppo:proximal=step clips pi/pi_old."""
    log_every: Annotated[int, Field(ge=1)] = 7
    """Steps between exact evaluations; coprime with the lags, or some ages are never seen."""

    @model_validator(mode="after")
    def _names(self):
        check_name("aggregation", self.aggregation, AGGREGATIONS)
        check_name("advantage", self.advantage, ADVANTAGES)
        check_name("KL estimator", self.kl, KL)
        if (file := self.advantage_file) is not None:
            if self.advantage != ADVANTAGE:
                raise ValueError(f"advantage {self.advantage} and advantage_file {file}: give one")
            with user_code(file):
                check_advantage(file, load_advantage(file, anew=forget_edited(file)))
        return self

    @property
    def to_advantages(self) -> Advantage:
        """The function of `advantage`, or of the user's file, whose errors are RunErrors of one line."""
        if (file := self.advantage_file) is None:
            return ADVANTAGES[self.advantage]
        function = loaded(file)

        def guarded(reward: Tensor, length: Tensor) -> Tensor:
            try:
                with user_code(file):
                    A = function(reward, length)
                    if A.shape != length.shape or not A.isfinite().all():
                        raise ValueError(
                            f"{file}: it gave advantages that are not finite, one an answer"
                        )
                    return A
            except ValueError as error:
                raise RunError(str(error)) from error

        return guarded

    @property
    def advantage_code(self) -> str | None:
        """A digest of the user's file and of what it imports beside it; None without one."""
        return code_of(self.advantage_file)


class Comparison(Strict):
    """Methods x lags x seeds, whatever the world: what `simlab compare` and `scaleup` share."""

    training: Training = Training()
    methods: tuple[str, ...] = METHODS
    """Arms, each [label=]name[@stream][:argument=value,...], with +term[:argument=value,...] for every correction on it: gspo+tis, ppo+icepop:low=0.5,high=5. In TOML also a table: {name = "gspo", terms = [{name = "tis", cap = 3}]}."""
    method_file: tuple[Path, ...] = ()
    """Files with a stabilizer of your own, which join under the name of the file; they are code and run, and must keep the promises of simlab/contract."""
    reference: str = "ppo"
    """Label of the arm that the others are compared with, seed by seed."""
    draws: Annotated[int, Field(ge=1, le=100)] = 3
    """Runs of the reference on every seed, each with sampling draws of its own, which are pooled: those that methods do not name are added (none to a lone reference)."""
    healthy_lag: str = "0"
    """Lag at which the reference shows what a healthy run reaches; its draws run there too where lags lack it. A run fails below 0.7 of the median final there."""
    lags: tuple[str, ...] = ("1", "4", "8", "24")
    """Lag regimes: a number n of optimizer steps per weight broadcast with one window of rollouts in flight, 0 for synchronous, or name:argument=value,... such as interval:n=8,in_flight=0 or fully_async:max_age=8."""
    seeds: Annotated[int, Field(ge=2, le=100_000)] = 24
    """Paired seeds, 0 to seeds - 1. Where the reference fails in 40 % of its runs, a method that never fails is seen with 24 seeds; where it fails in 23 %, with 48; a rescue of half of the failures takes more than 96 (reports/power). 8 see no rescue at all."""

    @field_validator("lags", "methods", mode="before")
    @classmethod
    def _in_one_word(cls, value):
        many = value if isinstance(value, (list, tuple)) else [value]
        return tuple(written(x) for x in many)

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
        regime(self.healthy_lag)
        if len({regime(spec) for spec in self.lags}) < len(self.lags):
            raise ValueError(f"two lags are the same regime ({', '.join(self.lags)})")
        for arm in self.arms:
            if arm.file is not None:
                with user_code(arm.file):
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
        files, arms = {}, []
        for path in self.method_file:
            with user_code(path):
                files[load(path, anew=forget_edited(path))] = str(path)
        unnamed = files.keys() - {x for spec in self.methods for x in parse(spec)[1].split("+")}
        for spec in (*self.methods, *(name for name in files if name in unnamed)):
            own = [files[x] for x in parse(spec)[1].split("+") if x in files]
            if len(set(own)) > 1:
                raise ValueError(
                    f"{spec!r}: a composition may hold one method file, not {len(own)}"
                )
            file = own[0] if own else None
            with user_code(file):
                arms.append(replace(Arm.parse(spec), file=file))
        return tuple(arms) + self._added(arms)

    def _added(self, arms: list[Arm]) -> tuple[Arm, ...]:
        """Draws of the reference beyond those among these arms, with streams that none of them has."""
        own = next((arm for arm in arms if arm.label == self.reference), None)
        if own is None or len(arms) == 1:
            return ()
        taken = {arm.stream for arm in arms if arm.rule == own.rule}
        free = [stream for stream in range(self.draws + len(taken)) if stream not in taken]
        missing = max(self.draws - len(taken), 0)
        return tuple(replace(own, label=f"{own.label}@{x}", stream=x) for x in free[:missing])

    @property
    def groups(self) -> dict[str, tuple]:
        """Within what arms are compared, by the name of its column."""
        return {"lag": self.lags}

    @property
    def notes(self) -> list[str]:
        """What a reader of the result must know of its input, a sentence each."""
        return []

    @cached_property
    def placebos(self) -> list[str]:
        """Labels of the other draws of the reference: arms with its very rule, whatever they are called,
        and sampling draws that no other of them has."""
        own = next(arm for arm in self.arms if arm.label == self.reference)
        draws = {own.stream: own.label}
        for arm in self.arms:
            if arm.rule == own.rule:
                draws.setdefault(arm.stream, arm.label)
        return [label for label in draws.values() if label != own.label]

    @property
    def healthy(self) -> str:
        """The healthy lag as `lags` spell it, if they have it."""
        same = (lag for lag in self.lags if regime(lag) == regime(self.healthy_lag))
        return next(same, self.healthy_lag)

    @property
    def plan(self) -> list[tuple[Arm, str]]:
        """Which arm runs at which lag: all at all, the reference first, then its draws at the healthy lag."""
        arms = sorted(self.arms, key=lambda arm: arm.label != self.reference)
        draws = [arm for arm in arms if arm.label in (self.reference, *self.placebos)]
        more = [(arm, self.healthy) for arm in draws if self.healthy not in self.lags]
        return [(arm, lag) for arm in arms for lag in self.lags] + more
