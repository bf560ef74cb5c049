"""The loop of an asynchronous run: which answers are begun when, which are trained on, what is pushed.

Every decision about time is the lag regime's, the object that the simulator asks: `may_start(batch,
served)` begins answers, `broadcast_now(step)` pushes weights, `on_broadcast` waits for the answers
in flight or sends the weights into them. Batch k is what optimizer step k trains on; version v of the
weights is what v steps made. Batches are trained in the order in which they were begun, each
answer once.

A checkpoint is taken when nothing is in flight. It holds the accepted answers that wait to be
trained on, so a killed run goes on with the very batches that it would have had.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import ray
import torch

from scaleup import checkpoint, weights
from scaleup.engines import START, Request
from scaleup.evaluate import avg_at_k
from scaleup.layouts import MARGIN, context
from scaleup.metrics import Metrics, finished, log_tokens, record
from scaleup.recipe import RunSpec, differs
from scaleup.responses import Response
from scaleup.rollout import Sample
from scaleup.session import Session
from scaleup.tasks import load_tokenizer, make
from simlab.advantages import ADVANTAGES
from simlab.config import RunError
from simlab.page import write

STATE = "run.pt"  # of a checkpoint: written last, so that one that holds it is whole
UNSEEN = 1_000_003  # the seed of evaluations, which no run trains on


class Controller:
    """One run. Raises RunError or ValueError, before anything is started, for a task or a checkpoint
    that does not belong to it."""

    def __init__(self, spec: RunSpec, out: Path, folder: Path):
        self.spec, self.out, self.folder = spec, Path(out), folder
        self.regime, self.how, self.world = spec.regime, spec.training, spec.world
        self.checkpoints = self.out / "checkpoints"
        self.step, self.served = 0, 0
        self.begun = 0  # batches whose answers were asked for
        self.ready: dict[int, dict[int, tuple]] = {}  # batch -> prompt -> (samples, rewards)
        record(self.out, spec)
        self.found = self._resume()
        world, exam = spec.world, spec.world.evaluation
        self.hf, self.tokenizer = weights.read_config(folder), load_tokenizer(folder)
        self.task = self._task(world.task, world.task_options, spec.seed)
        self.exam = None
        if world.evaluate_every:
            self.exam = self._task(exam.task, exam.task_options, UNSEEN)
            if exam.problems > self.exam.size:
                left = self.exam.counts.get("long", 0)
                raise RunError(
                    f"world.evaluation: {exam.problems} problems, but the task has {self.exam.size} "
                    f"({left} with prompts that are too long are left out)"
                )
        self.counted: dict[str, int] = {}  # what the task's checks have met so far
        # a resumed run shall not draw again what it drew before; read where answers have no seeds
        self.engine_seed = int(self._seeds(2, self.step, 0, 1)[0]) % 2**30

    def _task(self, name: str, options: dict, seed: int):
        room = context(self.hf, self.world) - self.world.max_new_tokens - MARGIN
        task = make(name, self.tokenizer, seed=seed, limit=room, **options)
        if task.largest_token() >= (size := self.hf["vocab_size"]):
            raise RunError(f"task {name} has token {task.largest_token()}, the model has {size}")
        return task

    def close(self) -> None:
        """End what the tasks run."""
        for task in (self.task, self.exam):
            if task is not None:
                task.close()

    # ------------------------------------------------------------ the loop
    def run(self, session: Session) -> Iterator[dict]:
        """Train to the end, from the last checkpoint or from the start; yields the row of each step."""
        if finished(self.out, self.spec):
            return
        self.session, pool = session, session.pool
        session.on_all("prepare", self.spec, str(self.folder), what="model", timeout=START)
        if self.found is not None:
            session.on_all("load", str(self.found), what=str(self.found), timeout=START)
        if self.served == self.step:  # else nothing is sampled before the next push
            self._serve(self.step)
        with closing(Metrics(self.out, self.spec, self.step)) as metrics:
            self.earlier = metrics.rows[-1]["seconds"] if metrics.rows else 0.0
            self.started, self.trained_seconds = time.monotonic(), 0.0
            while self.step < self.how.steps:
                self._fill()
                while len(self.ready.get(self.step, ())) < self.world.prompts:
                    if not pool.in_flight:
                        raise RunError(f"lag {self.spec.lag} never starts the batch of {self.step}")
                    self._accept(pool.collect(0.5))
                about, refs = self._train()
                while pool.in_flight and not _all_done(refs):
                    self._accept(pool.collect(0.05))
                row = self._trained(about, refs)
                self.step += 1
                metrics.add(row := row | self._publish())
                if (every := self.world.checkpoint_every) and self.step % every == 0:
                    self._checkpoint()
                yield row

    def _fill(self) -> None:
        """Begin the batches that the regime lets begin."""
        requests = []
        while self.begun < self.how.steps and self.regime.may_start(self.begun, self.served):
            for i in range(self.world.prompts):
                seeds = self._seeds(0, self.begun, i, self.world.answers)
                number = self.begun * self.world.prompts + i
                requests.append(self._request(self.task, number, self.begun, i, seeds))
            self.begun += 1
        self.session.pool.begin(requests)

    def _request(self, task, number: int, batch: int, index: int, seeds: np.ndarray) -> Request:
        """Answers to prompt `number` of a task."""
        how = {"max_new_tokens": self.world.max_new_tokens, "temperature": self.world.temperature}
        how |= {"ignore_eos": True} if task.eos is None else {"stop_token_ids": [task.eos]}
        routed = self.spec.replay == "r3"
        read = seeds.tolist() if self.world.engine.deterministic else None
        return Request(batch, index, task.prompt(number).ids, len(seeds), read, how, routed)

    def _seeds(self, purpose: int, batch: int, index: int, n: int) -> np.ndarray:
        """A seed for each of n answers."""
        key = (self.spec.seed, self.spec.arm.stream, purpose, batch, index)
        return np.random.SeedSequence(key).generate_state(n, np.uint64) >> np.uint64(1)

    def _accept(self, done: list) -> None:
        """Score what came back, and keep it under the step that will train on it."""
        for request, samples in done:
            number = request.batch * self.world.prompts + request.index
            prompts = [self.task.prompt(number)] * len(samples)
            rewards = self.task.rewards(prompts, [s.output for s in samples])
            samples = [s.copied() for s in samples]  # out of Ray's store, which is not so large
            self.ready.setdefault(request.batch, {})[request.index] = samples, rewards

    def _drain(self) -> None:
        while self.session.pool.in_flight:
            self._accept(self.session.pool.collect(0.5))

    # ------------------------------------------------------------ one step
    def _train(self) -> tuple[dict, list]:
        """Begin the optimizer step on the oldest batch."""
        batch = self.ready.pop(self.step)
        held = [batch[i] for i in range(self.world.prompts)]
        rewards = torch.tensor([r for _, r in held], dtype=torch.float64)
        lengths = torch.tensor([[len(s.output) for s in samples] for samples, _ in held])
        advantage = ADVANTAGES[self.how.advantage](rewards, lengths)
        responses, log = [], {"group": [], "reward": [], "finish_reason": []}
        digest = hashlib.sha256()
        for p, (samples, _) in enumerate(held):
            for g, s in enumerate(samples):
                digest.update(f"{self.step} {p} {g} {s.output}".encode())
                responses.append(
                    Response(
                        tokens=torch.tensor(s.prompt + s.output),
                        prompt=len(s.prompt),
                        logp_mu=s.logp_mu,
                        advantage=float(advantage[p, g]),
                        experts=s.experts,
                        fields={"age": self.step - s.version},
                    )
                )
                log["group"].append(p)
                log["reward"].append(float(rewards[p, g]))
                log["finish_reason"].append(s.finish)
        every = self.world.token_log_every
        logged = bool(every) and (self.step % every == 0 or self.step == self.how.steps - 1)
        about = {
            "step": self.step,
            "reward": float(rewards.mean()),
            "mixed": float((rewards.amax(1) > rewards.amin(1)).double().mean()),
            "length": float(lengths.double().mean()),
            "queue": sum(len(b) for b in self.ready.values()) / self.world.prompts,
            "in_flight": self.session.pool.in_flight,
            "served": self.served,
            "aborted": log["finish_reason"].count("abort"),
            "samples": digest.hexdigest()[:16],
        }
        self.began = time.monotonic()
        return about, self.session.begin_on_all("step", ray.put(responses), log if logged else None)

    def _trained(self, about: dict, refs: list) -> dict:
        """The row of a finished step; its token log is written."""
        found = self.session.finish(refs, f"step {self.step}")
        now = time.monotonic()
        self.trained_seconds += now - self.began
        if frames := [rows for _, rows in found if rows is not None]:
            log_tokens(self.out / "token_log", self.spec, self.step, frames)
        wall = now - self.started
        counts = {f"task_{k}": n - self.counted.get(k, 0) for k, n in self.task.counts.items()}
        self.counted = dict(self.task.counts)
        return (
            about
            | found[0][0]
            | counts
            | {
                "seconds": self.earlier + wall,
                "engine_busy": self.session.pool.busy() / wall,
                "trainer_busy": self.trained_seconds / wall,
                "engine_restarts": self.session.pool.restarts,
            }
        )

    # ------------------------------------------------------------ weights
    def _serve(self, version: int) -> None:
        """The engines get the trainer's weights under this number."""
        whole = self.session.weights(f"weights of version {version}")
        self.session.pool.push(whole, version)
        self.served = version

    def _publish(self) -> dict:
        """Serve the new weights when the regime says so; avg@k of them when that is due.

        After the last step they are served for the sake of an evaluation alone.
        """
        every, before = self.world.evaluate_every, self.served
        last = self.step == self.how.steps
        if not (every if last else self.regime.broadcast_now(self.step)):
            return {}
        if self.regime.on_broadcast == "drain":
            self._drain()
        self._serve(self.step)
        if every and (last or self.step // every > before // every):
            return self._evaluate()
        return {}

    def _evaluate(self) -> dict:
        """avg@k of the weights that are served."""
        self._drain()
        about, pool = self.world.evaluation, self.session.pool
        k, asked, scores = about.samples * about.repeats, range(about.problems), {}
        seeds = [self._seeds(1, self.step, i, k) for i in asked]
        pool.begin([self._request(self.exam, i, -1, i, seeds[i]) for i in asked])
        while pool.in_flight:
            for request, samples in pool.collect(0.5):
                prompts = [self.exam.prompt(request.index)] * k
                scores[request.index] = self.exam.rewards(prompts, [s.output for s in samples])
        each = np.array([scores[i] for i in asked]).reshape(-1, about.repeats, about.samples)
        found = avg_at_k(each.swapaxes(0, 1))
        return {
            "avg_at_k": found.avg,
            "avg_at_k_low": found.low,
            "avg_at_k_high": found.high,
            "avg_at_k_noise": found.noise,
        }

    # ------------------------------------------------------------ stop and go on
    def _checkpoint(self) -> None:
        """What goes on from here: trainers, then run.pt with numbers of batches and accepted answers."""
        self._drain()
        ready = [
            [batch, i, [vars(s) for s in samples], list(map(float, rewards))]
            for batch, prompts in self.ready.items()
            for i, (samples, rewards) in prompts.items()
        ]
        state = {"step": self.step, "begun": self.begun, "served": self.served, "ready": ready}
        state["settings"] = json.dumps(self.spec.fixed())
        what = f"checkpoint of step {self.step} in {self.checkpoints}"
        try:
            path = Path(self.session.on_all("save", str(self.checkpoints), what=what)[0])
            write(path / STATE, lambda part: torch.save(state, part))
        except (RunError, OSError, RuntimeError) as error:  # a full disk has many names
            said = str(error) if isinstance(error, RunError) else f"{what}: {error}"
            free = shutil.disk_usage(self.out).free / 1e6
            whole = checkpoint.latest(self.checkpoints, STATE)
            _remove(p for p in self.checkpoints.glob("step_*") if p != whole)
            raise RunError(f"{said} ({free:,.0f} MB of the disk were free)") from error
        _remove(p for p in self.checkpoints.glob("step_*") if p != path)

    def _resume(self) -> Path | None:
        """The last checkpoint, if there is one; its numbers and answers are taken over."""
        found = checkpoint.latest(self.checkpoints, STATE)
        if found is None:
            return None
        try:
            held = torch.load(found / STATE, weights_only=True)
        except Exception as error:  # what a torn file raises depends on where it is torn
            raise RunError(f"{found / STATE}: is no state of a run ({error})") from error
        if odd := differs(json.loads(held["settings"]), self.spec.fixed()):
            raise RunError(f"{found}: is a checkpoint of another run, its {odd} differs")
        self.step, self.begun, self.served = held["step"], held["begun"], held["served"]
        for batch, index, samples, rewards in held["ready"]:
            entry = [Sample(**s) for s in samples], rewards
            self.ready.setdefault(batch, {})[index] = entry
        return found


def _all_done(refs: list) -> bool:
    return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)


def _remove(folders) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
