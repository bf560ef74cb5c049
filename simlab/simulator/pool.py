"""Cells to worker processes. A module of its own, so that a worker loads no tables and no figures."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import (
    active_children,
    get_all_start_methods,
    get_context,
    parent_process,
)
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

from simlab.simulator.config import Cell
from simlab.simulator.train import train
from simlab.study.arms import sentence
from simlab.study.settings import RunError


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
        from simlab.simulator.token_rows import simulator_rows
        from simlab.token_log.files import write_step
        from simlab.token_log.schema import Run  # tables, which no other worker loads

        training, stabilizer = self.cell.training, self.cell.arm.stabilizer
        norm = training.aggregation == "seq_mean_token_sum_norm"
        run = Run.of(
            stabilizer,
            temperature=1.0,  # a noise model may have another: rollout log-probs are of the draw itself
            top_p=1.0,
            top_k=-1,
            logprob_mode="support",
            aggregation=training.aggregation,
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


def attempt(run: Callable[..., list[dict]], cell: Cell, log: TokenLog | None) -> list[dict]:
    """run(cell, log), whose failure is a RunError of one line with the line of the method's file."""
    try:
        return run(cell, log)
    except (RunError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a user's code may raise, sys.exit included
        where = f"{cell.arm.label} at lag {cell.lag}"
        raise RunError(f"{where}: {sentence(error, cell.arm.file)}") from error


Logs = dict[str, TokenLog]  # by the key of the cell; a cell without one is not logged


def in_process(
    cells: dict[str, Cell], workers: int, logs: Logs
) -> Iterator[tuple[str, list[dict]]]:
    threads = torch.get_num_threads()
    _alone()
    try:
        for key, cell in cells.items():
            yield key, attempt(train, cell, logs.get(key))
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def in_pool(cells: dict[str, Cell], workers: int, logs: Logs) -> Iterator[tuple[str, list[dict]]]:
    if not cells:
        return
    pool = ProcessPoolExecutor(min(workers, len(cells)), _context(), _worker)
    try:
        waiting = {
            pool.submit(attempt, train, cell, logs.get(key)): key for key, cell in cells.items()
        }
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


def _context() -> BaseContext:
    """Workers that start from one process in which torch is loaded already, where there is such a thing."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _worker() -> None:
    """A process of the pool: the parent alone answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _alone()


def _leave_with_parent() -> None:
    """A parent that was killed leaves no worker behind."""
    if parent := parent_process():
        parent.join()
        os._exit(1)


def _alone() -> None:
    """One thread (lanes are the parallelism), and no denormals (saturated tanh gradients)."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
