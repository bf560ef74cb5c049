"""Save a Trainer and resume exactly, also in another layout.

    save(folder, trainer)                # folder/step_00000100
    load(latest(folder), trainer)        # a trainer of any layout, just built

What is saved: weights, Adam's state, the number of steps taken and the whole-batch numbers that the
next step may read (the moving average of SAT's quantile). A folder step_* is whole: it is written
under another name and renamed at the end, so a killed save leaves the one before. All ranks write to,
and read from, the same file system; on several machines it must be a shared one.

Megatron writes from forked processes. They need psutil, without which they die and the save never ends.
"""

from __future__ import annotations

import importlib.util
import queue
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from scaleup.models.megatron import parallel_state
from scaleup.models.weights import unwrap
from scaleup.trainer.trainer import Trainer

from megatron.core import dist_checkpointing  # isort: skip  after the shim of megatron.py
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip

STATE = "trainer.pt"


def save(folder: str | Path, trainer: Trainer) -> Path:
    """Write folder/step_N and return it; collective. Raises ModuleNotFoundError without psutil."""
    if importlib.util.find_spec("psutil") is None:
        raise ModuleNotFoundError("checkpoint: Megatron's writer needs psutil")
    final = Path(folder) / f"step_{trainer.iteration:08d}"
    part = final.with_suffix(".part")
    if _first():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    # Megatron's own queue is a process that would outlive a killed rank
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_sharded(trainer), str(part))
    if _first():
        state = {
            "iteration": trainer.iteration,
            "stats": trainer.stats,
            "optimizers": len(_optimizers(trainer)),
        }
        torch.save(state, part / STATE)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    dist.barrier()
    return final


def latest(folder: str | Path, holding: str = STATE) -> Path | None:
    """The checkpoint of the largest step that is whole and holds this file, or None."""
    whole = (p.parent for p in Path(folder).glob(f"step_*/{holding}"))
    return max((p for p in whole if p.suffix != ".part"), default=None)


def load(path: str | Path, trainer: Trainer) -> None:
    """Continue at the checkpoint of `save`; collective.

    Raises ValueError for a trainer whose state is cut into another number of optimizers: Megatron may
    keep one for the experts and one for the rest, or one for both.
    """
    state = torch.load(Path(path) / STATE, weights_only=True)
    if state["optimizers"] != (n := len(_optimizers(trainer))):
        raise ValueError(
            f"checkpoint: state of {state['optimizers']} optimizers, this layout has {n}"
        )
    loaded = dist_checkpointing.load(_sharded(trainer, loading=True), str(path))
    unwrap(trainer.model).load_state_dict(loaded["model"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    for optimizer in _optimizers(trainer):
        for moments in optimizer.optimizer.state.values():
            if "step" in moments:  # Megatron hands one tensor to all, and each would advance it
                moments["step"] = moments["step"].clone()
    trainer.iteration, trainer.stats = state["iteration"], state["stats"]


def _sharded(trainer: Trainer, loading: bool = False) -> dict:
    """What every rank writes or fills, with the place of each part in the whole."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        # gathered over gloo, on one host: a GPU has no room for the whole of Adam
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    for optimizer in _optimizers(trainer):
        if not optimizer.optimizer.state:
            _start(optimizer)
    model = unwrap(trainer.model).sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _start(optimizer) -> None:
    """Give torch's Adam the state of no step: Megatron expects it to be there."""
    adam = optimizer.optimizer
    rates = [group["lr"] for group in adam.param_groups]
    for group in adam.param_groups:
        group["lr"] = 0.0
    optimizer._init_optimizer_states_with_dummy_values()
    for group, rate in zip(adam.param_groups, rates, strict=True):
        group["lr"] = rate
    for moments in adam.state.values():
        if "step" in moments:
            moments["step"].zero_()


def _optimizers(trainer: Trainer) -> list:
    return getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])


def _first() -> bool:
    return dist.get_rank() == 0
