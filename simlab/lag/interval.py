"""Interval n: the engine's weights are replaced every n optimizer steps.

    n          optimizer steps per weight broadcast ("configured lag")
    in_flight  windows of rollouts in flight: the batch of step k was sampled in_flight windows ago
    version    v(k) = n * max(floor(k / n) - in_flight, 0)
    age        k - v(k), from in_flight*n to (in_flight+1)*n - 1 (smaller in the first windows)

Worked example, n=2, in_flight=1: versions of steps 0..5 are 0 0 0 0 2 2, ages 0 1 2 3 2 3.
Configured lag 8 with one window in flight (the paper's pipeline) is age 8 to 15.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Weights every n steps, `in_flight` windows of rollouts ahead of the trainer."""

    n: int
    in_flight: int = 1

    on_broadcast = "drain"

    def __post_init__(self):
        if not (type(self.n) is int and self.n >= 1):
            raise ValueError(f"interval lag needs a whole n >= 1, got {self.n!r}")
        if not (type(self.in_flight) is int and self.in_flight >= 0):
            raise ValueError(f"interval lag needs a whole in_flight >= 0, got {self.in_flight!r}")

    @property
    def largest_age(self) -> int:
        """No token is older than this many optimizer steps when it is trained on."""
        return (self.in_flight + 1) * self.n - 1

    def broadcast_now(self, step: int) -> bool:
        """Whether the weights before optimizer step `step` are sent to the engine."""
        return step % self.n == 0

    def version(self, step: int) -> int:
        """Weight version (= optimizer step) that sampled the batch of `step`."""
        return max(step // self.n - self.in_flight, 0) * self.n

    def versions(self, step: int, horizon: int) -> list[int]:
        """The same version behind each of the `horizon` positions."""
        return [self.version(step)] * horizon

    def may_start(self, batch: int, served: int) -> bool:
        """Whether the batch of step `batch` may be sampled while version `served` is."""
        return served == self.version(batch)
