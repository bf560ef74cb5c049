"""The loop of an asynchronous run: when responses are begun, which are trained on, what is pushed.

Every decision about time is the lag regime's, the object that the simulator asks: `may_start(batch,
served)` begins responses, `broadcast_now(step)` pushes weights, `on_broadcast` waits for the responses
in flight or sends the weights into them. Batch k is what optimizer step k trains on; version v of the
weights is what v steps made. Batches are trained in the order in which they were begun, each
response once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import ray

from scaleup.models import weights
from scaleup.recipe import RunSpec
from scaleup.rollout.pool import START
from scaleup.run.actors import Actors
from scaleup.run.batch import Batch, Group, make_batch
from scaleup.run.evaluation import Evaluator
from scaleup.run.metrics import Metrics, finished, log_tokens, record
from scaleup.run.resume import Checkpoints
from scaleup.run.sampling import ENGINE, TRAINING, draws, make_task, request, seeds
from scaleup.tasks.text import load_tokenizer
from simlab.stabilizers import needs
from simlab.study.settings import RunError


@dataclass
class Clock:
    """Seconds of a run."""

    earlier: float  # before this process resumed it
    started: float = field(default_factory=time.monotonic)
    trained: float = 0.0  # in optimizer steps


class Controller:
    """One run on the actors. Raises RunError or ValueError, before anything is started, for a task or a
    checkpoint that does not belong to it."""

    def __init__(self, spec: RunSpec, out: Path, folder: Path, actors: Actors):
        self.spec, self.out, self.folder, self.actors = spec, Path(out), folder, actors
        self.regime, self.training, self.world = spec.regime, spec.training, spec.world
        self.to_advantages = self.training.to_advantages
        record(self.out, spec)
        self.checkpoints = Checkpoints(self.out / "checkpoints", spec)
        self.checkpoint, self.progress = self.checkpoints.latest()
        world, config, tokenizer = spec.world, weights.read_config(folder), load_tokenizer(folder)
        self.task = make_task(spec, config, tokenizer, world.task, world.task_options, spec.seed)
        self.evaluator = Evaluator(spec, config, tokenizer) if world.evaluate_every else None
        self.counted: dict[str, int] = {}  # the task's counts in the row before

    def close(self) -> None:
        """End what the tasks run."""
        self.task.close()
        if self.evaluator is not None:
            self.evaluator.close()

    # ------------------------------------------------------------ the loop
    def run(self) -> Iterator[dict]:
        """Train to the end, from the last checkpoint or from the start; yields the row of each step."""
        progress = self.progress
        # a resumed run must not repeat the draws it made before; read where responses have no seeds
        engine_seed = int(seeds(self.spec, ENGINE, progress.step, 0, 1)[0]) % 2**30
        self.actors.fit(self.world, self.folder, engine_seed)
        if finished(self.out, self.spec):
            return
        prepare = self.spec, str(self.folder)
        self.actors.on_all_ranks("prepare", *prepare, what="model", timeout=START)
        if (path := self.checkpoint) is not None:
            self.actors.on_all_ranks("load", str(path), what=str(path), timeout=START)
        if progress.served == progress.step:  # else nothing is sampled before the next push
            self._serve(progress.step)
        with closing(Metrics(self.out, self.spec, progress.step)) as metrics:
            clock = Clock(metrics.rows[-1]["seconds"] if metrics.rows else 0.0)
            while progress.step < self.training.steps:
                self._begin()
                self._await_batch()
                row = self._train(clock)
                progress.step += 1
                row |= self._publish()
                metrics.add(row)
                if (every := self.world.checkpoint_every) and progress.step % every == 0:
                    self._drain()
                    self.checkpoints.save(self.actors, progress)
                yield row

    # ------------------------------------------------------------ responses
    def _begin(self) -> None:
        """Begin the batches that the regime lets begin."""
        requests, progress, n = [], self.progress, self.world.prompts
        while progress.begun < self.training.steps and self.regime.may_start(
            progress.begun, progress.served
        ):
            for i in range(n):
                draws = seeds(self.spec, TRAINING, progress.begun, i, self.world.answers)
                number = progress.begun * n + i
                requests.append(request(self.spec, self.task, number, progress.begun, i, draws))
            progress.begun += 1
        self.actors.pool.begin(requests)

    def _await_batch(self) -> None:
        """Wait until the batch of this step is complete."""
        step, pool = self.progress.step, self.actors.pool
        while len(self.progress.ready.get(step, ())) < self.world.prompts:
            if not pool.in_flight:
                raise RunError(f"lag {self.spec.lag} never starts the batch of {step}")
            self._accept(pool.collect(0.5))

    def _drain(self) -> None:
        """Wait for all responses in flight."""
        while self.actors.pool.in_flight:
            self._accept(self.actors.pool.collect(0.5))

    def _accept(self, finished_requests: list) -> None:
        """Score what came back, and keep it under the step that will train on it."""
        for asked, samples in finished_requests:
            number = asked.batch * self.world.prompts + asked.index
            prompts = [self.task.prompt(number)] * len(samples)
            rewards = self.task.rewards(prompts, [s.output for s in samples])
            samples = [s.copied() for s in samples]  # out of Ray's store, which is not so large
            self.progress.ready.setdefault(asked.batch, {})[asked.index] = Group(samples, rewards)

    # ------------------------------------------------------------ one step
    def _train(self, clock: Clock) -> dict:
        """Take the optimizer step on the oldest batch, accepting responses meanwhile; the row of the step."""
        step, pool = self.progress.step, self.actors.pool
        groups = self.progress.ready.pop(step)
        ordered = [groups[i] for i in range(self.world.prompts)]
        wanted = needs(self.spec.arm.stabilizer)
        rng = draws(self.spec, step) if "uniform" in wanted else None
        batch = make_batch(step, ordered, self.to_advantages, wanted, rng)
        numbers = self._numbers(batch)
        every = self.world.token_log_every
        logged = bool(every) and (step % every == 0 or step == self.training.steps - 1)
        began, responses = time.monotonic(), ray.put(batch.responses)
        refs = self.actors.begin_on_all_ranks("step", responses, batch.columns if logged else None)
        while pool.in_flight and not _all_done(refs):
            self._accept(pool.collect(0.05))
        results = self.actors.finish(refs, f"step {step}")
        now = time.monotonic()
        clock.trained += now - began
        if frames := [rows for _, rows in results if rows is not None]:
            log_tokens(self.out / "token_log", self.spec, step, frames)
        wall = now - clock.started
        counts = {f"task_{k}": n - self.counted.get(k, 0) for k, n in self.task.counts.items()}
        self.counted = dict(self.task.counts)
        return (
            numbers
            | results[0][0]
            | counts
            | {
                "seconds": clock.earlier + wall,
                "engine_busy": pool.busy() / wall,
                "trainer_busy": clock.trained / wall,
                "engine_restarts": pool.restarts,
            }
        )

    def _numbers(self, batch: Batch) -> dict:
        """Numbers of the batch, and where the run is when its step begins."""
        waiting = sum(len(groups) for groups in self.progress.ready.values())
        return {
            "step": self.progress.step,
            "reward": batch.reward,
            "flat_groups": batch.flat_groups,
            "length": batch.length,
            "queue": waiting / self.world.prompts,
            "in_flight": self.actors.pool.in_flight,
            "served": self.progress.served,
            "aborted": batch.columns["finish_reason"].count("abort"),
            "samples": batch.digest,
        }

    # ------------------------------------------------------------ weights
    def _serve(self, version: int) -> None:
        """Give the engines the trainer's weights under this number."""
        whole = self.actors.weights(f"weights of version {version}")
        self.actors.pool.push(whole, version)
        self.progress.served = version

    def _publish(self) -> dict:
        """Serve the weights of this step when the regime says so; the numbers of an evaluation that is due.

        After the last step they are served for the sake of an evaluation alone.
        """
        step, before = self.progress.step, self.progress.served
        last, evaluator = step == self.training.steps, self.evaluator
        if not (evaluator is not None if last else self.regime.broadcast_now(step)):
            return {}
        if self.regime.on_broadcast == "drain":
            self._drain()
        self._serve(step)
        if evaluator is None or not (last or evaluator.due(step, before)):
            return {}
        self._drain()
        return evaluator.evaluate(self.actors.pool, step)


def _all_done(refs: list) -> bool:
    return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)
