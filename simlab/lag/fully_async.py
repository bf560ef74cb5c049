"""Fully asynchronous: weights are pushed after every optimizer step, into the answers in flight.

    max_age    no token is older than this many optimizer steps when it is trained on
    updates    pushes that an answer spans in the simulator, min(1, max_age) if not given
    version    v(k) = max(k - max_age, 0) is served when the batch of step k starts
    versions   position t of T was sampled by min(v(k) + floor(t (updates + 1) / T), k)
    age        k minus that, from max_age at the first position to max_age - updates at the last

The engine never waits. Batches are trained in the order in which they were started, and batch k may
start once version k - max_age is served: the queue is bounded, and with it the age. An answer goes on
under each new version that arrives. On a cluster the clock decides how many do, and `updates` is not
read; the simulator has no clock and splits every answer into updates + 1 spans of equal length.

Worked example, max_age=2, updates=1, answers of 4 tokens: the batch of step 0 was sampled by versions
0 0 0 0, of step 1 by 0 0 1 1, of step 2 by 0 0 1 1, of step 3 by 1 1 2 2. Ages of step 3: 2 2 1 1.
max_age=0 is synchronous.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FullyAsync:
    """A bounded queue, and new weights in the middle of an answer.

    Raises ValueError unless max_age >= 0 and 0 <= updates <= max_age, both whole.
    """

    max_age: int
    updates: int | None = None

    on_broadcast = "retract"

    def __post_init__(self):
        if not (type(self.max_age) is int and self.max_age >= 0):
            raise ValueError(f"fully_async lag needs a whole max_age >= 0, got {self.max_age!r}")
        if self.updates is None:
            object.__setattr__(self, "updates", min(1, self.max_age))
        if not (type(self.updates) is int and 0 <= self.updates <= self.max_age):
            raise ValueError(
                f"fully_async lag needs whole updates from 0 to max_age, got {self.updates!r}"
            )

    @property
    def largest_age(self) -> int:
        """No token is older than this many optimizer steps when it is trained on."""
        return self.max_age

    def broadcast_now(self, step: int) -> bool:
        """True: before every step."""
        return True

    def version(self, step: int) -> int:
        """Weight version that the batch of `step` starts with: its oldest."""
        return max(step - self.max_age, 0)

    def versions(self, step: int, horizon: int) -> list[int]:
        """Weight version behind each of the `horizon` positions of the batch of `step`."""
        first, spans = self.version(step), (self.updates or 0) + 1
        return [min(first + t * spans // horizon, step) for t in range(horizon)]

    def may_start(self, batch: int, served: int) -> bool:
        """Whether the batch of step `batch` may be sampled while version `served` is."""
        return batch <= served + self.max_age
