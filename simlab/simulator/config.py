"""A comparison in the toy world: the settings of study/settings.py, a world and its engine noise, cut into cells.

The defaults are experiment E1; other experiments say only what they change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import (
    Field,
    model_validator,
)

from simlab.core.arguments import check_name
from simlab.simulator.noise import NOISES, Noise, replay
from simlab.simulator.policies import POLICIES
from simlab.simulator.sweep import Values, axes, points
from simlab.simulator.tasks import TASKS
from simlab.study.arms import Arm
from simlab.study.settings import FLOAT32, Comparison, Training
from simlab.study.specs import named
from simlab.study.strict import Strict
from simlab.token_log.files import digests

SEEDS_PER_CELL = 48  # lanes of one program; more would not be faster
LARGEST = 1 << 22  # numbers in one table of a cell: 17 MB in float32, some thirty live at a time


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
    feature_scale: Annotated[float, Field(gt=0, le=FLOAT32, allow_inf_nan=False)] = 2.0
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


class Config(Comparison):
    """One comparison of `simlab compare`, in one world."""

    world: WorldSpec = WorldSpec()
    noise: tuple[str, ...] = ("grid", "router:scale=0.05", "gaussian:scale=0.05")
    """Engine noise, applied together, each name[:argument=value,...]; none at all if empty."""
    noise_from: Path | None = None
    """A log of trainer and rollout log-probs (file, folder or glob) to resample the noise from; replaces noise."""

    sweep: tuple[str, ...] = ()
    """Up to two settings over several values, each name=value,value,... such as training.lr=0.5,1,2 or sat.alpha=0.8,0.9 (an argument of an arm or of a noise model): a comparison at every point, and a map."""

    @model_validator(mode="after")
    def _points(self):
        _ = self.points  # an error of a point is an error of the settings
        return self

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
            try:
                return (Noise("replay", {"path": str(self.noise_from)}),)
            except RecursionError as error:
                raise ValueError(f"{self.noise_from}: is nested too deeply") from error
        return tuple(Noise(*named(spec)) for spec in self.noise)

    @cached_property
    def axes(self) -> dict[str, Values]:
        """What is swept, by name."""
        return axes(self.sweep)

    @property
    def points(self) -> list[tuple[dict[str, object], Config]]:
        """The comparisons of a sweep, each with its point; this one alone without a sweep."""
        if not self.sweep:
            return [({}, self)]
        settings = self.model_dump() | {"sweep": ()}
        return [(point, Config(**there)) for point, there in points(self.sweep, settings)]

    @property
    def groups(self) -> dict[str, tuple]:
        """Within what arms are compared: a lag at a point of the sweep."""
        return super().groups | self.axes

    @property
    def notes(self) -> list[str]:
        """What was left out of the logs that noise is replayed from, a sentence each."""
        logs = [n.arguments for n in self.noises if n.name == "replay"]
        return [note for arguments in logs for note in replay.notes(**arguments)]

    def cells(self) -> list[Cell]:
        """Units of work, the reference first, in blocks of seeds."""
        size = max(min(SEEDS_PER_CELL, LARGEST // self.world.largest), 1)
        blocks = [tuple(range(i, min(i + size, self.seeds))) for i in range(0, self.seeds, size)]
        return [
            Cell(self.world, self.training, arm, lag, self.noises, seeds)
            for seeds in blocks
            for arm, lag in self.plan
        ]


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
        """A name that changes when the numbers could: settings, the log's content, the method's code, `code`.

        `code` is a digest of this project's. Raises OSError for a file that cannot be read.
        """
        logs = [n.arguments["path"] for n in self.noise if n.name == "replay"]
        content = [digest for path in logs for digest in digests(path)]
        text = f"{code} {content} {self.arm.code} {self.training.advantage_code} {self!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
