"""The rollout pool: SGLang engines as Ray actors, routed by load, started anew when one dies.

A request is a prompt with n answers, and is accepted when all of them are back. An engine that dies
loses what it had in flight, never what was accepted: the pool gives those requests to an engine
again, with the same seeds. The pool remembers the weights that are served, and an engine that joins
is given them before it samples.

Log-probs of a row depend in the last bit on the rows beside it, so requests to an idle engine reach
its scheduler at once, and after a death all of them are begun again, those accepted too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import ray
import torch

from scaleup import weights
from scaleup.recipe import EngineSpec
from simlab.config import RunError

DEAD = (  # the last one is Ray's own doing, where the host runs out of memory
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
)
START = 600.0  # seconds that a start may take, whatever the recipe's timeout


class Request(NamedTuple):
    """A prompt of a step and the settings of its answers."""

    batch: int  # the step that will train on them
    index: int  # of the prompt in its batch
    prompt: list[int]
    n: int
    seeds: list[int] | None
    sampling: dict
    routed: bool = False  # the experts of every token are asked for

    @property
    def key(self) -> tuple[int, int]:
        """What names it in a run."""
        return self.batch, self.index


class Engine:
    """Body of an engine actor; calls never wait for answers longer than they are told."""

    def __init__(self, folder: str, spec: EngineSpec, seed: int):
        from scaleup.local import LocalEngine

        torch.set_num_threads(1)
        options = spec.options | {"random_seed": seed, "weight_version": "-1"}
        if spec.tp > 1:
            options["tp_size"] = spec.tp
        if spec.deterministic:
            options["enable_deterministic_inference"] = True
        self.engine = LocalEngine(folder, spec.dtype, spec.exact, **options)
        self.running: dict[tuple[int, int], tuple[Request, list]] = {}
        self.small = weights.narrow(weights.experts(self.engine.config))

    def begin(self, requests: list[Request]) -> None:
        """Start requests."""
        with nullcontext() if self.running else self.engine.held():
            for r in requests:
                futures = self.engine.submit([r.prompt], r.n, seeds=r.seeds, **r.sampling)
                self.running[r.key] = r, futures

    def collect(self, seconds: float) -> tuple[list[tuple[Request, list]], int]:
        """Requests that are done, after waiting for an answer at most so long; answers still to come."""
        if not self._done():
            wait(self._waiting(), seconds, return_when=FIRST_COMPLETED)
        found = []
        for key in self._done():
            request, futures = self.running.pop(key)
            found.append((request, [self._slim(f.result(), request) for f in futures]))
        return found, len(self._waiting())

    def _done(self) -> list[tuple[int, int]]:
        return [key for key, (_, futures) in self.running.items() if all(f.done() for f in futures)]

    def _waiting(self) -> list:
        return [f for _, futures in self.running.values() for f in futures if not f.done()]

    def _slim(self, sample, request: Request):
        held = sample.experts if request.routed else None
        return replace(sample, experts=None if held is None else held.to(self.small))

    def push(self, tensors: dict, version: int) -> None:
        """Serve these weights; into the answers in flight, if there are."""
        self.engine.push(tensors, version)

    def clear(self) -> None:
        """End all that is in flight and forget it, and the version that was served."""
        self.engine.abort_all()
        wait(self._waiting(), 60)
        self.running.clear()
        self.engine.forget()

    def pid(self) -> int:
        """Of the process."""
        return os.getpid()


@dataclass
class Member:
    """An engine of the pool as the controller sees it."""

    number: int
    actor: object = None  # None: to be started
    running: dict[tuple[int, int], Request] = field(default_factory=dict)
    group: list[Request] = field(default_factory=list)  # all of `running`, and what is back of it
    again: set[tuple[int, int]] = field(default_factory=set)  # of `running`: accepted once before
    asked: object = None  # the `collect` under way
    waiting: int = 0  # answers to come, as it said last
    silent: float = 0.0  # seconds of waiting for it since it took requests or ended an answer
    busy: float = 0.0  # seconds with answers in flight, those since `marked` aside
    marked: float = 0.0  # 0: there are none


class Pool:
    """The engines of a run. Raises RunError, in one sentence, when one is lost for good."""

    def __init__(self, folder: str, spec: EngineSpec, place: Callable[[int], dict]):
        """`place(i)` gives the Ray options of engine i."""
        self.folder, self.spec, self.place, self.seed = folder, spec, place, 0
        self.restarts, self.weights, self.version = 0, None, 0
        self.members = [Member(i) for i in range(spec.count)]

    def clear(self) -> None:
        """Forget requests and weights of an earlier run, and start the engines that are not there."""
        self.restarts, self.weights = 0, None
        self.members = [Member(m.number, m.actor) for m in self.members]
        self._on_all("clear", what="did not end its answers", lost=self._kill)
        missing = [m for m in self.members if m.actor is None]
        for m in missing:
            self._start(m)
        for m in missing:
            try:
                self._wait(m, m.actor.pid.remote(), "did not start", START)
            except DEAD as error:
                self._kill(m)
                raise RunError(f"engine {m.number} did not start: {last_line(error)}") from error

    # ------------------------------------------------------------ weights
    def push(self, weights, version: int) -> None:
        """Give the weights (an object of Ray's store) to every engine, at the same time."""
        self.weights, self.version = weights, version
        self._on_all("push", weights, version, what=self._refused, lost=self._revive)

    @property
    def _refused(self) -> str:
        return f"did not take version {self.version}"

    # ------------------------------------------------------------ requests
    def begin(self, requests: list[Request]) -> None:
        """Start requests, each on the engine with the fewest answers in flight."""
        given: dict[int, list[Request]] = {m.number: [] for m in self.members}
        load = [sum(r.n for r in m.running.values()) for m in self.members]
        for request in requests:
            least = load.index(min(load))
            load[least] += request.n
            given[least].append(request)
        for member in self.members:
            if mine := given[member.number]:
                member.group = [] if member.running else mine
                member.running |= {r.key: r for r in mine}
                member.silent = 0.0
                member.marked = member.marked or time.monotonic()
                try:
                    self._wait(member, member.actor.begin.remote(mine), "did not start answers")
                except DEAD:
                    self._revive(member)

    def collect(self, seconds: float) -> list[tuple[Request, list]]:
        """Requests that are done; waits for one at most so long."""
        for m in self.members:
            if m.running and m.asked is None:
                m.asked = m.actor.collect.remote(seconds)
        asked = {m.asked: m for m in self.members if m.asked is not None}
        if not asked:
            return []
        before = time.monotonic()
        ray.wait(list(asked), timeout=seconds + 1)
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for m in asked.values():
            m.silent += time.monotonic() - before
        done = []
        for ref in ready:
            member, asked[ref].asked = asked[ref], None
            try:
                found, waiting = self._wait(member, ref, "failed")
            except DEAD:
                self._revive(member)
            else:
                done += self._accepted(member, found, waiting)
        for m in self.members:
            if m.running and m.silent > self.spec.timeout:
                self._revive(m, f"ended no answer in {self.spec.timeout:g} s")
        return done

    def _accepted(self, member: Member, found: list, waiting: int) -> list[tuple[Request, list]]:
        """What came back for the first time."""
        done = []
        for request, samples in found:
            del member.running[request.key]
            if request.key not in member.again:
                done.append((request, samples))
            member.again.discard(request.key)
        if found or waiting != member.waiting:
            member.silent = 0.0
        member.waiting = waiting
        if not member.running:
            self._idle(member)
        return done

    def _idle(self, member: Member) -> None:
        """It has no answers in flight any more."""
        member.busy += time.monotonic() - member.marked if member.marked else 0.0
        member.marked = 0.0

    @property
    def in_flight(self) -> int:
        """Requests that are not back."""
        return sum(len(m.running) for m in self.members)

    def busy(self) -> float:
        """Seconds with answers in flight, mean over the engines."""
        now = time.monotonic()
        spent = [m.busy + (now - m.marked if m.marked else 0.0) for m in self.members]
        return sum(spent) / len(spent)

    # ------------------------------------------------------------ what can go wrong
    def _start(self, member: Member) -> None:
        # not the draws of the others, nor of the one that died
        seed = self.seed + member.number + self.spec.count * self.restarts
        actor = ray.remote(Engine).options(**self.place(member.number))
        member.actor = actor.remote(self.folder, self.spec, seed)

    def _revive(self, member: Member, why: str = "died") -> None:
        """A new engine in place of a lost one; its requests start again."""
        self._kill(member)
        if self.restarts >= self.spec.restarts:
            raise RunError(
                f"engine {member.number} {why}, and {self.restarts} restarts are used up; "
                "the same command resumes at the last checkpoint"
            )
        self.restarts += 1
        self._start(member)
        try:
            self._wait(member, member.actor.pid.remote(), "did not start again", START)
            if self.weights is not None:
                push = member.actor.push.remote(self.weights, self.version)
                self._wait(member, push, self._refused)
            missing = {k: r for k, r in member.running.items() if k not in member.again}
            lost = (member.group or list(missing.values())) if missing else []
            member.running = {r.key: r for r in lost}
            member.again = member.running.keys() - missing.keys()
            if lost:
                self._wait(member, member.actor.begin.remote(lost), "did not start answers")
            else:
                self._idle(member)
        except DEAD as error:
            self._kill(member)
            raise RunError(f"engine {member.number} died again: {last_line(error)}") from error
        member.silent = 0.0

    def _on_all(self, method: str, *arguments, what: str, lost) -> None:
        """A call on all engines at the same time; `lost` is told of a dead one."""
        present = [m for m in self.members if m.actor is not None]
        refs = [getattr(m.actor, method).remote(*arguments) for m in present]
        for member, ref in zip(present, refs, strict=True):
            try:
                self._wait(member, ref, what)
            except DEAD:
                lost(member)

    def _wait(self, member: Member, ref, what: str, timeout: float = 0.0):
        """What a call returns. One that hangs or refuses ends the run; of a dead one DEAD is raised."""
        timeout = max(timeout, self.spec.timeout)
        try:
            return ray.get(ref, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            self._kill(member)
            raise RunError(
                f"engine {member.number} {what} within {timeout:g} s and was stopped"
            ) from error
        except ray.exceptions.RayTaskError as error:
            self._kill(member)  # paused or half pushed, for all that is known
            raise RunError(f"engine {member.number} {what}: {last_line(error)}") from error

    def _kill(self, member: Member) -> None:
        if member.actor is not None:
            ray.kill(member.actor)
        member.actor = member.asked = None

    def close(self) -> None:
        """End the engines."""
        for m in self.members:
            self._kill(m)


def last_line(error: Exception) -> str:
    """The last line of what a Ray task raised."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
