"""Cells to worker processes. A module of its own, so that a worker loads no tables and no figures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context

import torch

from simlab.config import Cell
from simlab.train import train


class RunError(Exception):
    """A run that cannot go on; its message is one sentence for the user."""


def in_process(cells: dict[str, Cell], workers: int) -> Iterator[tuple[str, list[dict]]]:
    threads = torch.get_num_threads()
    _alone()
    try:
        for key, cell in cells.items():
            yield key, train(cell)
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def in_pool(cells: dict[str, Cell], workers: int) -> Iterator[tuple[str, list[dict]]]:
    if not cells:
        return
    pool = ProcessPoolExecutor(
        min(workers, len(cells)), get_context("spawn"), _worker, (os.getpid(),)
    )
    try:
        waiting = {pool.submit(train, cell): key for key, cell in cells.items()}
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
