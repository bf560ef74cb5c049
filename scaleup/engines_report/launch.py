"""Functions on n ranks of one machine, for tests and small runs on a CPU.

    with Ranks(2) as ranks:               # two processes, one gloo group, kept until the end
        results = ranks(function, *args)  # function(*args) on every rank; list by rank
    results = run(function, 2, *args)     # the same for a single call
    results = shared(2)(function, *args)  # ranks kept for the whole process, as a test suite wants

The function and its results must be picklable: a function of a module, not a lambda. Inside, the
default process group is there (`torch.distributed.get_rank()`), torch has one thread, and the
Megatron shim is installed. If a rank fails or exceeds the time limit, all are stopped and the call
raises RuntimeError with the text of the first failure; the ranks cannot be used again.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait


def _serve(rank: int, n: int, store: str, timeout: float, pipe) -> None:
    """Body of a rank: run what arrives, send back what it returns."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from scaleup.cpu import mcore

    warnings.filterwarnings("ignore", module="megatron")  # what it would do with a GPU
    warnings.filterwarnings("ignore", module="torch.distributed", category=FutureWarning)
    torch.set_num_threads(1)
    mcore.install()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=timeout),
    )
    while (call := pipe.recv_bytes()) != b"":
        try:
            function, args, arguments = pickle.loads(call)
            answer = True, function(*args, **arguments)
            pipe.send_bytes(pickle.dumps(answer))
        except Exception:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    os._exit(0)  # nothing to save, and gloo's threads take their time


class Ranks:
    """n processes that share a gloo group. `timeout` in seconds holds for each call.

    `daemon=False` lets a rank start processes of its own, as Megatron's writer of checkpoints does.
    """

    def __init__(self, n: int, timeout: float = 120.0, daemon: bool = True):
        self.n, self.timeout = n, timeout
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(n):
            here, there = context.Pipe()
            args = (rank, n, os.path.join(self._folder.name, "store"), timeout, there)
            process = context.Process(target=_serve, args=args, daemon=daemon)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        atexit.register(self.close)  # before multiprocessing waits for those that are no daemons

    def __call__(self, function: Callable, *args, **arguments) -> list:
        """function(*args, **arguments) on every rank. Raises RuntimeError when a rank fails."""
        if not self._pipes:
            raise RuntimeError("these ranks are closed")
        call = pickle.dumps((function, args, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results, waiting = {}, {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + self.timeout
        while waiting:
            ready = wait(list(waiting), max(end - time.monotonic(), 0))
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} gave no answer in {self.timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    good, results[rank] = False, "the process ended"
                if not good:
                    self._fail(f"rank {rank} of {self.n} failed:\n{results[rank]}")
        return [results[rank] for rank in range(self.n)]

    def _fail(self, why: str) -> None:
        self.close(kill=True)
        raise RuntimeError(why)

    def close(self, kill: bool = False) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send_bytes(b"")
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
            pipe.close()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def run(function: Callable, n: int, *args, timeout: float = 120.0) -> list:
    """function(*args) on n new ranks; their results by rank."""
    with Ranks(n, timeout) as ranks:
        return ranks(function, *args)


_SHARED: dict[int, Ranks] = {}


def shared(n: int) -> Ranks:
    """Ranks that every caller of this process shares; started anew after a failure."""
    if n not in _SHARED or not _SHARED[n]._pipes:
        _SHARED[n] = Ranks(n)
    return _SHARED[n]
