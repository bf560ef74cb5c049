"""The state of a run between two steps, and its checkpoints.

A checkpoint is taken when nothing is in flight. It holds the accepted samples that wait to be trained
on, so a killed run resumes with the very batches that it would have had. A folder step_* is whole once
run.pt is in it, which is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scaleup.recipe import RunSpec, differs
from scaleup.rollout.sample import Sample
from scaleup.run.actors import Actors
from scaleup.run.batch import Group
from scaleup.trainer import checkpoint
from simlab.study.files import write
from simlab.study.settings import RunError

STATE = "run.pt"


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0  # optimizer steps taken
    served: int = 0  # version of the weights that the engines serve
    begun: int = 0  # batches whose responses were asked for
    ready: dict[int, dict[int, Group]] = field(default_factory=dict)  # accepted: batch -> prompt


class Checkpoints:
    """The checkpoints of a run in `folder`; the last one is kept."""

    def __init__(self, folder: Path, spec: RunSpec):
        self.folder, self.spec = folder, spec

    def latest(self) -> tuple[Path | None, Progress]:
        """The last checkpoint and the progress in it; (None, no progress) where there is none.

        Raises RunError for a torn one and for one of another run.
        """
        path = checkpoint.latest(self.folder, STATE)
        if path is None:
            return None, Progress()
        try:
            state = torch.load(path / STATE, weights_only=True)
        except Exception as error:  # what a torn file raises depends on where it is torn
            raise RunError(f"{path / STATE}: is no state of a run ({error})") from error
        if name := differs(json.loads(state["settings"]), self.spec.fixed()):
            raise RunError(f"{path}: is a checkpoint of another run, its {name} differs")
        progress = Progress(state["step"], state["served"], state["begun"])
        for batch, index, samples, rewards in state["ready"]:
            group = Group([Sample(**s) for s in samples], rewards)
            progress.ready.setdefault(batch, {})[index] = group
        return path, progress

    def save(self, actors: Actors, progress: Progress) -> None:
        """Write the trainers' state, then `progress`; nothing may be in flight.

        Raises RunError, and leaves no torn checkpoint behind.
        """
        ready = [
            [batch, index, [vars(s) for s in group.samples], list(map(float, group.rewards))]
            for batch, groups in progress.ready.items()
            for index, group in groups.items()
        ]
        state = {"step": progress.step, "begun": progress.begun, "served": progress.served}
        state |= {"ready": ready, "settings": json.dumps(self.spec.fixed())}
        what = f"checkpoint of step {progress.step} in {self.folder}"
        try:
            path = Path(actors.on_all_ranks("save", str(self.folder), what=what)[0])
            write(path / STATE, lambda part: torch.save(state, part))
        except (RunError, OSError, RuntimeError) as error:  # a full disk has many names
            cause = str(error) if isinstance(error, RunError) else f"{what}: {error}"
            free = shutil.disk_usage(self.folder.parent).free / 1e6
            whole = checkpoint.latest(self.folder, STATE)
            _remove(p for p in self.folder.glob("step_*") if p != whole)
            raise RunError(f"{cause} ({free:,.0f} MB of the disk were free)") from error
        _remove(p for p in self.folder.glob("step_*") if p != path)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
