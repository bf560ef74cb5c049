"""Measurements of checkpoints on real trainers: steps after a resume against those of a run that went on.

They run on a rank, like those of measure.py.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from scaleup.engines_report.measure import routed_responses, start, take

BEFORE, AFTER = 2, 2  # steps up to the checkpoint, and past it
FROM = {"DP2": {}, "EP2": {"ep": 2}}
RESUMED = [
    ("DP2", 2, {}),
    ("DP2", 1, {}),
    ("DP2", 2, {"pp": 2}),
    ("DP2", 2, {"ep": 2}),
    ("EP2", 1, {}),
    ("EP2", 2, {"ep": 2}),
    ("EP2", 2, {"tp": 2, "ep": 2}),
]


def resumable(folder, layout):
    """A trainer whose checkpoint holds everything that one can hold, and its micro-batches."""
    trainer = start(folder, layout, lr=1e-3, quantile="ema", decay=0.5, weight_decay=0.1)
    return trainer, trainer.collate(routed_responses(trainer))


def save_and_go_on(folder, path: Path, layout) -> list[dict]:
    """The steps past the last of two checkpoints."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from scaleup.trainer import checkpoint

    trainer, micro = resumable(folder, layout)
    checkpoint.save(path, trainer)  # before any step: a state of zeros
    take(trainer, micro, BEFORE)
    checkpoint.save(path, trainer)
    filesystem_async._results_queue = None  # Megatron's helper would outlive a killed rank
    gc.collect()
    return take(trainer, micro, AFTER)


def resume(folder, path: Path, layout, one_counter=False) -> tuple[list[dict], str, int]:
    """The same steps from the last checkpoint, its name, the step reached.
    `one_counter` leaves all parameters one step counter of Adam, as Megatron does."""
    from scaleup.trainer import checkpoint

    trainer, micro = resumable(folder, layout)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()  # nothing is left of the first weights
    last = checkpoint.latest(path)
    checkpoint.load(last, trainer)
    if one_counter:
        for optimizer in checkpoint._optimizers(trainer):
            states = list(optimizer.optimizer.state.values())
            for moments in states:
                moments["step"] = states[0]["step"]
    return take(trainer, micro, AFTER), last.name, trainer.iteration
