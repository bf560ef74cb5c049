"""What outlives a run: the engines and the trainer ranks, as Ray actors.

Runs that differ in method, lag, replay, seed and sizes of a batch share them. What a failed run
leaves broken is started anew by the next one.
"""

from __future__ import annotations

from pathlib import Path

import ray

from scaleup import smollm, tiny
from scaleup.engines import DEAD, START, Pool, last_line
from scaleup.layouts import bundles
from scaleup.places import Places
from scaleup.rank import Rank
from scaleup.recipe import EngineWorld
from simlab.config import RunError

NOTICE = 10.0  # seconds in which Ray sees a death that the other ranks, left alone, report first


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


class Session:
    """Engines and trainer ranks of a world."""

    def __init__(self):
        self.world, self.places, self.pool, self.ranks = None, None, None, []

    def fit(self, world: EngineWorld, folder: Path, seed: int) -> None:
        """Make them those of `world`, whose weights are like those in `folder`; keep what fits.

        `seed` is for engines that are started.
        """
        before, self.world = self.world, world
        if self.pool is None or _kept(before) != _kept(world):
            self.close()
            self.places = Places(world, START)
            self.pool = Pool(str(folder), world.engine, self.places.engine)
        self.pool.folder, self.pool.spec, self.pool.seed = str(folder), world.engine, seed
        if len(self.ranks) != world.trainer.ranks:
            self._drop_ranks()
            joined = self._start_ranks(world.trainer.ranks)
        else:
            joined = []
        self.pool.clear()  # starts engines while the ranks start
        self.finish(joined, "start", START)

    def _start_ranks(self, n: int) -> list:
        self.ranks = [ray.remote(Rank).options(**self.places.rank(i)).remote() for i in range(n)]
        address = self.ranks[0].address.remote(n)
        timeout = max(self.world.engine.timeout, START)
        return [rank.join.remote(i, n, address, timeout) for i, rank in enumerate(self.ranks)]

    # ------------------------------------------------------------ collective calls
    def on_all(self, method: str, *arguments, what: str, timeout: float = 0.0) -> list:
        """A collective call; what every rank returns. Raises RunError in one sentence."""
        return self.finish(self.begin_on_all(method, *arguments), what, timeout)

    def begin_on_all(self, method: str, *arguments) -> list:
        """The references of a collective call."""
        return [getattr(rank, method).remote(*arguments) for rank in self.ranks]

    def finish(self, refs: list, what: str, timeout: float = 0.0) -> list:
        """Wait for a collective call. One that fails ends all ranks: they may wait for each other."""
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
                why = f"ranks {late} gave no answer within {timeout:g} s"
            raise RunError(f"{what}: trainer {why}") from error

    def weights(self, what: str):
        """The reference of the whole checkpoint; it stays where rank 0 is."""
        refs = [rank.export.options(num_returns=2).remote() for rank in self.ranks]
        self.finish([done for done, _ in refs], what)
        return refs[0][1]

    # ------------------------------------------------------------ the end
    def _drop_ranks(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)
        self.ranks = []

    def close(self) -> None:
        """End all of it."""
        self._drop_ranks()
        if self.pool is not None:
            self.pool.close()
        if self.places is not None:
            self.places.close()
        self.places = self.pool = None


def _kept(world: EngineWorld) -> tuple:
    """What engines are started with, and where all of it is."""
    spec = world.engine.model_copy(update={"timeout": 1.0, "restarts": 0})
    return world.model, spec, bundles(world)


def _end(ref):
    """How a call ended: its error, True, or None where it has not."""
    if not ray.wait([ref], timeout=0.0)[0]:
        return None
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return error
    return True
