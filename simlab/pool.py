"""Cells to worker processes. A module of its own, so that a worker loads no tables and no figures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path

import torch

from simlab.config import Cell, RunError
from simlab.train import train


@dataclass(frozen=True)
class TokenLog:
    """The hook of `train` that writes the token log of one cell: a file in `folder` a logged step.

    Raises RunError when a file cannot be written.
    """

    folder: Path
    cell: Cell
    code_version: str
    notes: dict[str, str]

    def __call__(self, step, b, answers, logp, logp_rollout) -> None:
        from simlab.token_log import Run, write_step  # tables, which no other worker loads
        from simlab.token_rows import simulator_rows

        how, stabilizer = self.cell.training, self.cell.arm.stabilizer
        norm = how.aggregation == "seq_mean_token_sum_norm"
        run = Run.of(
            stabilizer,
            temperature=1.0,  # a noise model may have another: rollout log-probs are of the draw itself
            top_p=1.0,
            top_k=-1,
            logprob_mode="support",
            aggregation=how.aggregation,
            horizon=self.cell.world.horizon if norm else None,
            code_version=self.code_version,
            notes=self.notes,
        )
        rows = simulator_rows(
            b,
            step=step,
            seeds=self.cell.seeds,
            slot=answers.slot,
            reward=answers.reward,
            logp_rollout=logp_rollout,
            logp=logp,
        )
        try:
            write_step(self.folder, step, rows, run)
        except OSError as error:
            raise RunError(
                f"{self.folder}: cannot be written ({error.strerror or error})"
            ) from error


Logs = dict[str, TokenLog]  # by the key of the cell; a cell without one is not logged


def in_process(
    cells: dict[str, Cell], workers: int, logs: Logs
) -> Iterator[tuple[str, list[dict]]]:
    threads = torch.get_num_threads()
    _alone()
    try:
        for key, cell in cells.items():
            yield key, train(cell, logs.get(key))
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def in_pool(cells: dict[str, Cell], workers: int, logs: Logs) -> Iterator[tuple[str, list[dict]]]:
    if not cells:
        return
    pool = ProcessPoolExecutor(
        min(workers, len(cells)), get_context("spawn"), _worker, (os.getpid(),)
    )
    try:
        waiting = {pool.submit(train, cell, logs.get(key)): key for key, cell in cells.items()}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BrokenProcessPool as error:
        raise RunError("a worker died (out of memory?); finished cells are kept") from error
    except BaseException:
        for process in active_children():
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _worker(parent: int) -> None:
    """A process of the pool: the parent alone answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(parent,), daemon=True).start()
    _alone()


def _leave_with_parent(parent: int) -> None:
    """A parent that was killed leaves no worker behind."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _alone() -> None:
    """One thread (lanes are the parallelism), and no denormals (saturated tanh gradients)."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
