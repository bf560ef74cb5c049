"""Synchronous: every batch is sampled by the weights it trains. Age 0, d = implementation noise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sync:
    """Broadcast before every step, wait for the batch."""

    largest_age = 0

    def broadcast_now(self, step: int) -> bool:
        """Always."""
        return True

    def version(self, step: int) -> int:
        """The current one."""
        return step
