"""Numbers of a run: JSON lines, TensorBoard, the token log; Weights & Biases if installed and asked for.

metrics.jsonl holds one line a step. A run that resumes at step k keeps the lines before k.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import polars as pl

from scaleup.recipe import RunSpec, differs
from simlab.study.files import commit, write
from simlab.study.settings import RunError
from simlab.token_log.files import write_step
from simlab.token_log.schema import Run

FILES = ("settings.json", "metrics.jsonl", "tensorboard", "token_log", "checkpoints")  # of a run


def record(folder: Path, spec: RunSpec) -> dict | None:
    """Version and commits of a run folder, from its settings.json; None in a new folder.

    Raises RunError for a folder that holds another run.
    """
    path = folder / "settings.json"
    if not path.exists():
        return None
    try:
        recorded = json.loads(path.read_text())
        name = differs(recorded["settings"], spec.fixed())
        made = {"version": recorded["version"], "commits": list(recorded["commits"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: does not say which run the folder holds ({error!r})") from error
    if name:
        raise RunError(f"{folder}: holds another run, its {name} differs; choose another --out")
    return made


def finished(folder: Path, spec: RunSpec) -> bool:
    """Whether the run is done. Raises RunError as `record`."""
    known = record(folder, spec) is not None
    return known and len(read(folder / "metrics.jsonl")) == spec.training.steps


def claim(folder: Path, spec: RunSpec) -> None:
    """Write settings.json, with every commit that worked on the run. Raises RunError as `record`."""
    commits = (record(folder, spec) or {"commits": []})["commits"]
    recorded = {
        "settings": spec.fixed(),
        "version": version("simlab"),
        "commits": list(dict.fromkeys([*commits, commit()])),
    }
    with _named(folder / "settings.json"):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(recorded, indent=2) + "\n"
        write(folder / "settings.json", lambda part: part.write_text(text))


class Metrics:
    """Lines of `folder`/metrics.jsonl before `step`, and those that are added.

    Raises RunError when they cannot be written.
    """

    def __init__(self, folder: Path, spec: RunSpec, step: int):
        self.folder = Path(folder)
        claim(self.folder, spec)
        self.path = self.folder / "metrics.jsonl"
        self.rows = [row for row in read(self.path) if row["step"] < step]
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        with _named(self.path):
            write(self.path, lambda part: part.write_text(text))
            self._file = self.path.open("ab", buffering=0)
        self._board = self._wandb = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board_folder = self.folder / "tensorboard"
            with _named(self._board_folder):
                self._board = SummaryWriter(str(self._board_folder), purge_step=step)
        if os.environ.get("WANDB_PROJECT") and importlib.util.find_spec("wandb") is not None:
            import wandb

            # the same run when it resumes
            digest = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]
            self._wandb = wandb.init(
                id=digest, name=spec.name, config=spec.settings(), resume="allow"
            )

    def add(self, row: dict) -> None:
        """One step; a number that is not finite is written as null."""
        row = {k: _finite(v) for k, v in row.items()}
        self.rows.append(row)
        line, size = (json.dumps(row) + "\n").encode(), self._file.tell()
        with _named(self.path):
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._file.truncate(size)
                raise
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k != "step"}
        if self._board is not None:
            with _named(self._board_folder):
                for name, value in numbers.items():
                    self._board.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=row["step"])

    def close(self) -> None:
        """Close the files and the loggers."""
        self._file.close()
        if self._board is not None:
            with suppress(OSError):  # a full disk was reported before
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def log_tokens(folder: Path, spec: RunSpec, step: int, frames: list[pl.DataFrame]) -> None:
    """Write the file of a step of the token log, from the rows of each rank. Raises RunError."""
    world, training = spec.world, spec.training
    norm = training.aggregation == "seq_mean_token_sum_norm"
    run = Run.of(
        spec.arm.stabilizer,
        temperature=world.temperature,
        top_p=1.0,
        top_k=-1,
        logprob_mode="scaled",
        aggregation=training.aggregation,
        horizon=world.max_new_tokens if norm else None,
        code_version=commit(),
        notes={
            "engine": f"sglang {world.engine.dtype}",
            "trainer": "megatron-core",
            "model": world.model,
        },
    )
    rows = pl.concat(frames, how="vertical_relaxed").sort("response")
    with _named(folder / f"step_{step:08d}.parquet"):
        write_step(folder, step, rows, run)


def read(path: Path) -> list[dict]:
    """Rows of a metrics file; a last line that was cut is left out."""
    rows = []
    for line in path.read_text().split("\n") if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror or error})") from error


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value
