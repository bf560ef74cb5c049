"""How the engine's distribution differs from the trainer's AT EQUAL WEIGHTS.

A noise module has one or more of
    weights(w, rng, *, ...)   on the weights that the engine holds
    router(g, rng, *, ...)    on router logits [L, S, experts]
    logits(z, rng, *, ...)    on logits [L, P, T, M, V]
One field is drawn per broadcast: mu is then a definite policy and every theorem stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from simlab.core.arguments import check_arguments, check_name, settable
from simlab.simulator.noise import (
    gaussian,
    grid,
    replay,
    router,
    shift,
    student_t,
    temperature,
    truncate,
)
from simlab.simulator.policies import log_normalise
from simlab.simulator.rng import Generators

NOISES: dict[str, ModuleType] = {
    "gaussian": gaussian,
    "grid": grid,
    "replay": replay,
    "router": router,
    "shift": shift,
    "student_t": student_t,
    "temperature": temperature,
    "truncate": truncate,
}
STAGES = ("weights", "router", "logits")


class Stage(Protocol):
    """What a noise module defines under the name of a stage: the weights, the router logits or the logits, changed."""

    def __call__(self, x: Any, rng: Generators, /, **arguments: Any) -> Any:
        """`x` with this noise, drawn from `rng`."""
        ...


@dataclass(frozen=True)
class Noise:
    """A registry module with its arguments.

    Raises ValueError in one sentence for an unknown name, argument or value.
    """

    name: str
    arguments: dict = field(default_factory=dict)

    def __post_init__(self):
        check_name("noise", self.name, NOISES)
        stages = (getattr(NOISES[self.name], stage, None) for stage in STAGES)
        known = {k: v for function in stages if function for k, v in settable(function).items()}
        check_arguments(f"noise {self.name}", known, self.arguments)
        tiny = {"weights": {"w": torch.zeros(1, 2, 2)}, "router": torch.zeros(1, 1, 2)}
        tiny["logits"] = torch.zeros(1, 1, 1, 1, 2)
        for stage, x in tiny.items():
            self.at(stage, x, Generators([0]))  # the modules check their own values

    def at(self, stage: str, x, rng: Generators):
        """x after this noise's part in a stage, x itself if it has none."""
        function: Stage | None = getattr(NOISES[self.name], stage, None)
        return function(x, rng, **self.arguments) if function else x


def behaviour(
    policy: ModuleType, w: dict, X: Tensor, shape: tuple, noises, rng: Generators
) -> Tensor:
    """log mu `[L, P, T, M, V]` of an engine that holds weights w; `shape` is (P, T, M, V)."""

    def chain(stage, x):
        for noise in noises:
            x = noise.at(stage, x, rng)
        return x

    z = policy.logits(chain("weights", w), X, router=lambda g: chain("router", g))
    return log_normalise(chain("logits", z.unflatten(1, shape[:-1])))
