"""Synchronous: every batch is sampled by the weights it trains. Age 0, d = implementation noise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sync:
    """Broadcast before every step, wait for the batch."""

    largest_age = 0
    on_broadcast = "drain"

    def broadcast_now(self, step: int) -> bool:
        """True: before every step."""
        return True

    def version(self, step: int) -> int:
        """The current one."""
        return step

    def versions(self, step: int, horizon: int) -> list[int]:
        """The same version behind each of the `horizon` positions."""
        return [self.version(step)] * horizon

    def may_start(self, batch: int, served: int) -> bool:
        """Whether the batch of step `batch` may be sampled while version `served` is."""
        return served == self.version(batch)
