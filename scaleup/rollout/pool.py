"""The rollout pool: SGLang engines as Ray actors, routed by load, started anew when one dies.

A request is a prompt with n responses, and is accepted when all of them are back. An engine that dies
loses what it had in flight, never what was accepted: the pool gives those requests to an engine
again, with the same seeds. The pool keeps the weights that are served, and an engine that joins
gets them before it samples.

The last bit of a log-prob depends on the other rows of the batch, so requests to an idle engine reach
its scheduler together, and after a death all of them start again, accepted ones too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from scaleup.rollout.actor import EngineActor, Request
from scaleup.world import EngineSpec
from simlab.study.settings import RunError

DEAD = (  # the last one is Ray's own doing, where the host runs out of memory
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
)
START = 600.0  # seconds that a start may take, whatever the recipe's timeout


@dataclass
class Member:
    """An engine of the pool as the controller sees it."""

    number: int
    actor: object = None  # None: to be started
    running: dict[tuple[int, int], Request] = field(default_factory=dict)
    group: list[Request] = field(
        default_factory=list
    )  # those begun together: `running` and finished
    again: set[tuple[int, int]] = field(default_factory=set)  # of `running`: accepted once before
    collecting: object = None  # the reference of the `collect` under way
    responses: int = 0  # in flight, by its last report
    silent: float = 0.0  # seconds of waiting since it took requests or finished a response
    busy: float = 0.0  # seconds with responses in flight, up to `busy_since`
    busy_since: float = 0.0  # 0: nothing is in flight


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
        self._on_all("clear", what="did not end its responses", lost=self._kill)
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
        """Start requests, each on the engine with the fewest responses in flight."""
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
                member.busy_since = member.busy_since or time.monotonic()
                try:
                    self._wait(
                        member, member.actor.begin.remote(mine), "did not start its requests"
                    )
                except DEAD:
                    self._revive(member)

    def collect(self, seconds: float) -> list[tuple[Request, list]]:
        """Requests that are finished, with their samples; waits for one at most so long."""
        for m in self.members:
            if m.running and m.collecting is None:
                m.collecting = m.actor.collect.remote(seconds)
        collecting = {m.collecting: m for m in self.members if m.collecting is not None}
        if not collecting:
            return []
        before = time.monotonic()
        ray.wait(list(collecting), timeout=seconds + 1)
        ready, _ = ray.wait(list(collecting), num_returns=len(collecting), timeout=0)
        for m in collecting.values():
            m.silent += time.monotonic() - before
        accepted = []
        for ref in ready:
            member, collecting[ref].collecting = collecting[ref], None
            try:
                finished, responses = self._wait(member, ref, "failed")
            except DEAD:
                self._revive(member)
            else:
                accepted += self._accept(member, finished, responses)
        for m in self.members:
            if m.running and m.silent > self.spec.timeout:
                self._revive(m, f"finished no response in {self.spec.timeout:g} s")
        return accepted

    def _accept(self, member: Member, finished: list, responses: int) -> list[tuple[Request, list]]:
        """The requests that finished for the first time."""
        accepted = []
        for request, samples in finished:
            del member.running[request.key]
            if request.key not in member.again:
                accepted.append((request, samples))
            member.again.discard(request.key)
        if finished or responses != member.responses:
            member.silent = 0.0
        member.responses = responses
        if not member.running:
            self._idle(member)
        return accepted

    def _idle(self, member: Member) -> None:
        """Stop the clock of an engine without responses in flight."""
        member.busy += time.monotonic() - member.busy_since if member.busy_since else 0.0
        member.busy_since = 0.0

    @property
    def in_flight(self) -> int:
        """Number of requests that are not finished."""
        return sum(len(m.running) for m in self.members)

    def busy(self) -> float:
        """Seconds with responses in flight, mean over the engines."""
        now = time.monotonic()
        spent = [m.busy + (now - m.busy_since if m.busy_since else 0.0) for m in self.members]
        return sum(spent) / len(spent)

    # ------------------------------------------------------------ what can go wrong
    def _start(self, member: Member) -> None:
        # other draws than the other engines, and than the one that died
        seed = self.seed + member.number + self.spec.count * self.restarts
        actor = ray.remote(EngineActor).options(**self.place(member.number))
        member.actor = actor.remote(self.folder, self.spec, seed)

    def _revive(self, member: Member, why: str = "died") -> None:
        """Start a new engine in place of a lost one, and its requests again."""
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
                self._wait(member, member.actor.begin.remote(lost), "did not start its requests")
            else:
                self._idle(member)
        except DEAD as error:
            self._kill(member)
            raise RunError(f"engine {member.number} died again: {last_line(error)}") from error
        member.silent = 0.0

    def _on_all(self, method: str, *arguments, what: str, lost) -> None:
        """Call all engines at the same time; `lost(member)` is called for a dead one."""
        present = [m for m in self.members if m.actor is not None]
        refs = [getattr(m.actor, method).remote(*arguments) for m in present]
        for member, ref in zip(present, refs, strict=True):
            try:
                self._wait(member, ref, what)
            except DEAD:
                lost(member)

    def _wait(self, member: Member, ref, what: str, timeout: float = 0.0):
        """The result of a call. An engine that hangs or refuses ends the run; a dead one raises DEAD."""
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
        member.actor = member.collecting = None

    def close(self) -> None:
        """End the engines."""
        for m in self.members:
            self._kill(m)


def last_line(error: Exception) -> str:
    """The last line of what a Ray task raised."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
