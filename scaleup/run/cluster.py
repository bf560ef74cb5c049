"""The Ray cluster of a command, and the actor in which its runs are controlled.

with cluster(recipe.world) as run:
    for row in run(spec, out):    # one run after another on the same engines
        ...
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import ray

from scaleup import cpu
from scaleup.recipe import RunSpec
from scaleup.world import EngineWorld
from simlab.study.settings import RunError
from simlab.study.strict import ConfigError

LOGS = "SCALEUP_LOGS"  # set: what the actors print, tracebacks included


class ControllerActor:
    """The Ray actor that controls one run after another; it owns the engines and the trainer ranks."""

    def __init__(self):
        self.actors = None

    def run(self, spec: RunSpec, out: str) -> Iterator[dict | str]:
        """The rows of a run; after a failure the last item is the sentence that says what went wrong."""
        from scaleup.run.actors import Actors, checkpoint_folder
        from scaleup.run.controller import Controller

        try:
            folder = checkpoint_folder(spec.world, spec.seed, Path(out))
            self.actors = self.actors or Actors()
            with closing(Controller(spec, Path(out), folder, self.actors)) as controller:
                yield from controller.run()
        except Exception as error:
            if os.environ.get(LOGS):
                traceback.print_exc()
            yield sentence(error, out)


def sentence(error: Exception, out: str) -> str:
    """What went wrong, on one line."""
    if isinstance(error, OSError):
        return f"{error.filename or out}: {error.strerror or error}"
    if isinstance(error, (ConfigError, RunError, ValueError)):
        return " ".join(str(error).split())
    lines = str(error).strip().splitlines() or [""]
    return f"{out}: {type(error).__name__}: {lines[0]} (set {LOGS}=1 for more)"


def _reachable(address: str) -> None:
    """Raises RunError within seconds where nothing listens at host:port; Ray itself waits for minutes."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"RAY_ADDRESS {address}: nothing answers there ({error}); start Ray with `ray start --head`, "
            "or unset RAY_ADDRESS to run on this machine alone"
        ) from error


@contextmanager
def cluster(world: EngineWorld) -> Iterator[Callable[[RunSpec, Path], Iterator[dict]]]:
    """Join the Ray cluster of RAY_ADDRESS, or start one on this machine, for as long as the block lasts.

    Raises RunError. A run whose iterator is dropped continues in the background until the block ends.
    """
    logs = os.environ.get(LOGS)
    env = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_worker_niceness"] = (
        "0"  # at Ray's 15 a run starves beside anything else on the machine
    )
    # batches and weights are read in place from Ray's store, without a copy; nothing writes into them
    env["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    os.environ.update(env)
    variables = cpu.env() | env if world.gpus_per_node == 0 else env
    variables |= {k: v for k, v in os.environ.items() if k == LOGS or k.startswith("WANDB_")}
    address = os.environ.get("RAY_ADDRESS", "local")
    _reachable(address)
    local = {"include_dashboard": False, "num_cpus": os.cpu_count()} if address == "local" else {}

    def run(spec: RunSpec, out: Path) -> Iterator[dict]:
        rows = controller.run.options(num_returns="streaming").remote(
            spec, str(Path(out).resolve())
        )
        try:
            for ref in rows:
                row = ray.get(ref)
                if isinstance(row, str):
                    raise RunError(row)
                yield row
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise RunError(
                "the controller died; the same command resumes at the last checkpoint"
            ) from error
        except ray.exceptions.RayError as error:
            raise RunError(sentence(error, str(out))) from error

    try:
        try:
            ray.init(
                address=address,
                log_to_driver=bool(logs),
                logging_level="ERROR",
                runtime_env={"env_vars": variables},
                **local,
            )
        except Exception as error:
            raise RunError(f"Ray did not start: {sentence(error, address)}") from error
        controller = ray.remote(ControllerActor).options(num_cpus=0).remote()
        yield run
    finally:
        ray.shutdown()
