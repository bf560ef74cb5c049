"""The Ray actors that do the work of a run: engines and trainer ranks. They outlive it.

Runs that differ in method, lag, replay, seed and batch sizes share them. After a failed run the next
one restarts those that are broken.
"""

from __future__ import annotations

from pathlib import Path

import ray

from scaleup.models import smollm, tiny
from scaleup.plan.layouts import bundles
from scaleup.rollout.pool import DEAD, START, Pool, last_line
from scaleup.run.placement import Placement
from scaleup.trainer.rank import Rank
from scaleup.world import EngineWorld
from simlab.study.settings import RunError

NOTICE = 10.0  # seconds until Ray notices a dead rank, which the others may report first


def checkpoint_folder(world: EngineWorld, seed: int, out: Path) -> Path:
    """The Hugging Face checkpoint of the first weights; written here if the recipe makes them."""
    name, arguments = world.maker
    if name == "tiny":
        return tiny.write(out / f"model_seed{seed}", **({"seed": seed} | arguments))
    if name == "smollm":
        return smollm.write(out / "smollm")
    if not (Path(name) / "config.json").exists():
        raise RunError(f"world.model: {name} holds no config.json")
    return Path(name)


class Actors:
    """Engines and trainer ranks, started by `fit`."""

    def __init__(self):
        self.world: EngineWorld | None = None
        self.placement: Placement | None = None
        self.pool: Pool | None = None
        self.ranks: list = []

    def fit(self, world: EngineWorld, folder: Path, seed: int) -> None:
        """Start what `world` needs and is not there yet, and end what it cannot use.

        `folder` holds weights of the shapes that are trained; `seed` is for engines that are started.
        """
        before, self.world = self.world, world
        if self.pool is None or _kept(before) != _kept(world):
            self.close()
            self.placement = Placement(world, START)
            self.pool = Pool(str(folder), world.engine, self.placement.engine)
        self.pool.folder, self.pool.spec, self.pool.seed = str(folder), world.engine, seed
        if len(self.ranks) != world.trainer.ranks:
            self._drop_ranks()
            joined = self._start_ranks(world.trainer.ranks)
        else:
            joined = []
        self.pool.clear()  # starts engines while the ranks start
        self.finish(joined, "start", START)

    def _start_ranks(self, n: int) -> list:
        self.ranks = [ray.remote(Rank).options(**self.placement.rank(i)).remote() for i in range(n)]
        address = self.ranks[0].address.remote(n)
        timeout = max(self.world.engine.timeout, START)
        return [rank.join.remote(i, n, address, timeout) for i, rank in enumerate(self.ranks)]

    # ------------------------------------------------------------ collective calls
    def on_all_ranks(self, method: str, *arguments, what: str, timeout: float = 0.0) -> list:
        """Make a collective call; returns the result of every rank. Raises RunError in one sentence."""
        return self.finish(self.begin_on_all_ranks(method, *arguments), what, timeout)

    def begin_on_all_ranks(self, method: str, *arguments) -> list:
        """Start a collective call; returns its references."""
        return [getattr(rank, method).remote(*arguments) for rank in self.ranks]

    def finish(self, refs: list, what: str, timeout: float = 0.0) -> list:
        """Wait for a collective call. A failure ends all ranks, since they may wait for each other."""
        timeout = max(timeout, self.world.engine.timeout)
        try:
            return ray.get(refs, timeout=timeout)
        except ray.exceptions.RayError as error:
            if not isinstance(error, ray.exceptions.GetTimeoutError):
                ray.wait(refs, num_returns=len(refs), timeout=NOTICE)
            ends = [_end(ref) for ref in refs]
            self._drop_ranks()
            if dead := [i for i, end in enumerate(ends) if isinstance(end, DEAD)]:
                why = f"rank {dead[0]} died; the same command resumes at the last checkpoint"
            elif failed := [end for end in ends if isinstance(end, Exception)]:
                why = f"failed: {last_line(failed[0])}"
            else:
                late = [i for i, end in enumerate(ends) if end is None]
                why = f"ranks {late} did not finish within {timeout:g} s"
            raise RunError(f"{what}: trainer {why}") from error

    def weights(self, what: str):
        """The reference of the whole checkpoint, which stays on the node of rank 0."""
        refs = [rank.export.options(num_returns=2).remote() for rank in self.ranks]
        self.finish([done for done, _ in refs], what)
        return refs[0][1]

    # ------------------------------------------------------------ the end
    def _drop_ranks(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)
        self.ranks = []

    def close(self) -> None:
        """End engines and ranks, and give the GPUs back."""
        self._drop_ranks()
        if self.pool is not None:
            self.pool.close()
        if self.placement is not None:
            self.placement.close()
        self.placement = self.pool = None


def _kept(world: EngineWorld) -> tuple:
    """What cannot change while engines are kept: their start settings, and the placement of all actors."""
    spec = world.engine.model_copy(update={"timeout": 1.0, "restarts": 0})
    return world.model, spec, bundles(world)


def _end(ref):
    """How a call ended: its error, or True; None where it has not ended."""
    if not ray.wait([ref], timeout=0.0)[0]:
        return None
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return error
    return True
