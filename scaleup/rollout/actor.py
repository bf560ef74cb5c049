"""One engine of the rollout pool, in a process of its own, and the requests that it is sent."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from scaleup.models import families
from scaleup.rollout.sample import Sample
from scaleup.world import EngineSpec


class Request(NamedTuple):
    """A prompt of a step and the settings of its n responses."""

    batch: int  # the step that will train on them
    index: int  # of the prompt in its batch
    prompt: list[int]
    n: int
    seeds: list[int] | None
    sampling: dict
    routed: bool = False  # the experts of every token are asked for
    head: int = 0  # log-probs of so many likeliest tokens are asked for

    @property
    def key(self) -> tuple[int, int]:
        """A name that is unique among the requests in flight."""
        return self.batch, self.index


class EngineActor:
    """The Ray actor around a LocalEngine; no call waits for responses longer than it is told to."""

    def __init__(self, folder: str, spec: EngineSpec, seed: int):
        from scaleup.rollout.local import LocalEngine

        torch.set_num_threads(1)
        options = spec.options | {"random_seed": seed, "weight_version": "-1"}
        if spec.tp > 1:
            options["tp_size"] = spec.tp
        if spec.deterministic:
            options["enable_deterministic_inference"] = True
        self.engine = LocalEngine(folder, spec.dtype, spec.exact, **options)
        self.running: dict[tuple[int, int], tuple[Request, list]] = {}
        self.small = families.narrow(families.experts(self.engine.config))

    def begin(self, requests: list[Request]) -> None:
        """Start requests."""
        with nullcontext() if self.running else self.engine.together():
            for r in requests:
                futures = self.engine.submit(
                    [r.prompt], r.n, seeds=r.seeds, head=r.head, **r.sampling
                )
                self.running[r.key] = r, futures

    def collect(self, seconds: float) -> tuple[list[tuple[Request, list]], int]:
        """(finished requests with their samples, responses in flight), after waiting at most so long for one."""
        if not self._done():
            wait(self._waiting(), seconds, return_when=FIRST_COMPLETED)
        finished = []
        for key in self._done():
            request, futures = self.running.pop(key)
            finished.append((request, [self._slim(f.result(), request) for f in futures]))
        return finished, len(self._waiting())

    def _done(self) -> list[tuple[int, int]]:
        return [key for key, (_, futures) in self.running.items() if all(f.done() for f in futures)]

    def _waiting(self) -> list:
        return [f for _, futures in self.running.values() for f in futures if not f.done()]

    def _slim(self, sample: Sample, request: Request) -> Sample:
        """Experts only where they are asked for, in the smallest integer type that fits."""
        experts = sample.experts if request.routed else None
        return replace(sample, experts=None if experts is None else experts.to(self.small))

    def push(self, tensors: dict, version: int) -> None:
        """Serve these weights; responses in flight go on under them."""
        self.engine.push(tensors, version)

    def clear(self) -> None:
        """End and forget the responses in flight, and the version that was served."""
        self.engine.abort_all()
        wait(self._waiting(), 60)
        self.running.clear()
        self.engine.forget()

    def pid(self) -> int:
        """The process id; a call that returns says that the engine has started."""
        return os.getpid()
