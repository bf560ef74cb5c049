"""Bytes of what a recipe starts: a trainer rank, an engine, a node."""

from __future__ import annotations

from typing import NamedTuple


class RankMemory(NamedTuple):
    """A rank of one pipeline stage; all of a stage hold as much. Bytes."""

    ranks: range
    dense: int  # parameters
    experts: int
    gpu: dict[str, float]  # during the passes, without the batch
    stepping: float  # during Adam's step, without the batch
    host: dict[str, float]

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def need(self) -> float:
        """Of the GPU at the fullest moment, without the batch."""
        return max(sum(self.gpu.values()), self.stepping)


class EngineMemory(NamedTuple):
    """An engine with its cache of keys and values; None where a CPU sets no limit."""

    weights: float  # bytes of a GPU
    token: float  # bytes of a token in the cache of a GPU
    tokens: int | None  # that the cache holds
    answers: int | None  # of full length, at once


class HostMemory(NamedTuple):
    """A node. Bytes."""

    ranks: int
    engines: int
    always: dict[str, float]
    moments: dict[str, dict[str, float]]
    store: float  # of all that, in Ray's object store, at most

    @property
    def need(self) -> float:
        """At the fullest moment."""
        return sum(self.always.values()) + max(sum(x.values()) for x in self.moments.values())
