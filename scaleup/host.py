"""The controller as a Ray actor, and the one way for a command to start it.

with cluster(recipe.world) as run:
    for row in run(spec, out):    # one run after another on the same engines
        ...
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import ray

from scaleup import cpu
from scaleup.recipe import EngineWorld, RunSpec
from simlab.config import ConfigError, RunError

LOGS = "SCALEUP_LOGS"  # set: what the actors print, tracebacks included


class Host:
    """Body of the controller's actor."""

    def __init__(self):
        self.session = None

    def run(self, spec: RunSpec, out: str) -> Iterator[dict | str]:
        """Rows of a run; a problem is its sentence, the last thing that comes."""
        from scaleup.controller import Controller
        from scaleup.session import Session, checkpoint_folder

        try:
            folder = checkpoint_folder(spec.world, spec.seed, Path(out))
            controller = Controller(spec, Path(out), folder)
            with closing(controller):
                self.session = self.session or Session()
                self.session.fit(spec.world, folder, controller.engine_seed)
                yield from controller.run(self.session)
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


@contextmanager
def cluster(world: EngineWorld) -> Iterator[Callable[[RunSpec, Path], Iterator[dict]]]:
    """Join the Ray cluster of RAY_ADDRESS, or start one on this machine, for as long as the block lasts.

    Raises RunError. A run that is left before its end goes on in the background until the block ends.
    """
    logs = os.environ.get(LOGS)
    env = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    # batches and weights are read where Ray's store holds them; nobody writes into what arrives
    env["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    os.environ.update(env)
    variables = cpu.env() | env if world.gpus_per_node == 0 else env
    variables |= {k: v for k, v in os.environ.items() if k == LOGS or k.startswith("WANDB_")}
    address = os.environ.get("RAY_ADDRESS", "local")
    local = {"include_dashboard": False, "num_cpus": os.cpu_count()} if address == "local" else {}

    def run(spec: RunSpec, out: Path) -> Iterator[dict]:
        rows = host.run.options(num_returns="streaming").remote(spec, str(Path(out).resolve()))
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
        host = ray.remote(Host).options(num_cpus=0).remote()
        yield run
    finally:
        ray.shutdown()
