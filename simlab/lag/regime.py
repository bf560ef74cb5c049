"""What a lag regime has to answer. A version is the number of optimizer steps that made the weights."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Regime(Protocol):
    """The decisions of one asynchronous run, here and on a cluster.

    In the simulator lag is injected by indexing stored behaviour tables, never by sleeping: it reads
    `versions`. A cluster has a clock and reads the other members. tests/lag measures that they agree.
    """

    @property
    def largest_age(self) -> int:
        """No token is older, in optimizer steps, when it is trained on; a test measures it."""
        ...

    @property
    def on_broadcast(self) -> str:
        """What happens to the answers in flight when weights are replaced.

        "drain": the engine finishes them first. "retract": they go on under the newer weights.
        """
        ...

    def broadcast_now(self, step: int) -> bool:
        """Whether the weights before optimizer step `step` are sent to the engine."""
        ...

    def may_start(self, batch: int, served: int) -> bool:
        """Whether the batch of step `batch` may be sampled while version `served` is."""
        ...

    def version(self, step: int) -> int:
        """The oldest weight version behind the batch of `step`."""
        ...

    def versions(self, step: int, horizon: int) -> list[int]:
        """The version behind each of the `horizon` positions of its answers, oldest first."""
        ...
