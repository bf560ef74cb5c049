"""Verifiers in processes of their own, each call with a deadline; the one of math problems.

    pool = VerifierPool(workers=2, timeout=10)
    pool([("1/2", r"So it is \\boxed{\\frac{1}{2}}.")])      # [1.0]
    pool.counts                                           # {"timeout": 0, "crash": 0, "unreadable": 0}

A symbolic comparison can take for ever, take all memory, or end its process. math-verify's own
timeouts are signals: they need a main thread and cannot end a loop inside an extension. So a worker
process checks one response at a time, is killed at the deadline, and is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

START = 180.0  # seconds a process may take to import its verifier
MEMORY = 4 * 2**30  # bytes of address space of one process
FAILURES = ("timeout", "crash", "unreadable")


class Verifier(Protocol):
    """A function that a worker process calls; named "module:function" in a module that can be imported."""

    def __call__(self, answer: str, text: str, timeout: float) -> float | str:
        """The score in [0, 1] of a response `text` by the right answer, or the name of a failure.

        `timeout` in seconds is the time it has. It must score ("1", "1", ...) with 1.
        """


def last_boxed(text: str) -> str:
    r"""The last closed \boxed{...} of a text with its braces, the innermost of nested ones; else the text."""
    last, opened = (-1, 0), []  # the last box that closes; starts of those that are open
    for brace in re.finditer(r"\\boxed\{|[{}]", text):
        if brace[0] != "}":
            opened.append(brace.start() if len(brace[0]) > 1 else -1)
        elif opened:
            last = max(last, (opened.pop(), brace.end()))
    return text[slice(*last)] if last[0] >= 0 else text


def math_verify(answer: str, text: str, timeout: float) -> float | str:
    r"""1.0 where `text` ends in `answer`, by math-verify; a `Verifier`.

    The last \boxed{} of the text counts; without one, what math-verify finds, from the end. The
    answer is LaTeX with or without delimiters. "unreadable" is an answer that cannot be parsed.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    seconds = max(1, int(timeout))  # of one alarm; the parent's deadline holds for all of them
    if "$" not in answer and r"\boxed" not in answer:
        answer = rf"\boxed{{{answer}}}"
    try:
        gold = parse(answer, parsing_timeout=seconds)
        if not gold:
            return "unreadable"
        kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        text = last_boxed(text.replace("\N{MINUS SIGN}", "-"))
        candidates = parse(text, kinds, parsing_timeout=seconds, raise_on_error=True)
        return float(verify(gold, candidates, timeout_seconds=seconds, raise_on_error=True))
    except TimeoutException:
        return "timeout"


class Worker:
    """One process that scores one response at a time; started when it is first needed."""

    def __init__(self, verifier: str, timeout: float, setup: dict | None):
        self.verifier, self.timeout, self.setup, self.process = verifier, timeout, setup, None

    def _ask(self, line: str, seconds: float) -> tuple[str, bool]:
        """(the reply of the process to a line, "" if it ended; whether it was killed at the deadline)"""
        process, killed = self.process, []

        def kill():
            killed.append(True)
            process.kill()

        deadline = threading.Timer(seconds, kill)
        deadline.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        finally:
            deadline.cancel()
            deadline.join()
        if killed or not reply:
            self.close()
        return reply, bool(killed)

    def __call__(self, answer: str, text: str) -> float | str:
        """The score, or the name of a failure. Raises RuntimeError if the process does not start."""
        if self.process is None:
            words = [self.verifier, str(self.timeout), json.dumps(self.setup)]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scaleup.tasks.verifier", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            if not self._ask("", START)[0]:
                raise RuntimeError(
                    f"verify: {self.verifier} could not be started; its process wrote why"
                )
        reply, killed = self._ask(json.dumps([answer, text]) + "\n", self.timeout + 1)
        return json.loads(reply) if reply else "timeout" if killed else "crash"

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # a line it did not read
                process.stdin.close()


class VerifierPool:
    """A pool of worker processes. `timeout` in seconds holds for one response.

    `verifier` is the "module:function" of a `Verifier`. With `setup`, a dict of JSON, the function is
    called with it in each process and returns the verifier.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout: float = 10.0,
        verifier: str = "scaleup.tasks.verifier:math_verify",
        setup: dict | None = None,
    ):
        self._free = queue.SimpleQueue()
        self._workers = [Worker(verifier, timeout, setup) for _ in range(workers)]
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(workers)
        self.counts = dict.fromkeys(FAILURES, 0)

    def _score(self, pair: tuple[str, str]) -> float | str:
        worker = self._free.get()
        try:
            return worker(*pair)
        finally:
            self._free.put(worker)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Scores of (right answer, response text) pairs, in order; a failure scores 0 and is counted by its name."""
        scores = []
        for score in self._threads.map(self._score, pairs):
            if isinstance(score, str):
                self.counts[score] += 1
            scores.append(0.0 if isinstance(score, str) else score)
        return scores

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


def _serve(verifier: str, timeout: float, setup: dict | None) -> None:
    """The body of a worker process: a JSON line in, a JSON line out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a Ctrl-C
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a verifier prints is no reply
    module, name = verifier.split(":")
    verify = getattr(importlib.import_module(module), name)
    if setup is not None:
        verify = verify(**setup)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def reply(value) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    # fail fast if the verifier is missing or broken, rather than score 0; this call also does its imports
    if setup is None and (score := verify("1", "1", START)) != 1:
        sys.exit(
            f"verify: {verifier} says {score!r} of the answer 1 to a problem with the answer 1"
        )
    reply("ready")
    for line in sys.stdin:
        # if the parent is gone, this much processor time ends the process, whatever it does
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * timeout + 10)
        try:
            score = verify(*json.loads(line), timeout)
        except MemoryError:
            raise  # a process that has no room left would fail on all that follows
        except Exception:
            score = "crash"
        number = isinstance(score, int | float) and 0 <= score <= 1
        reply(score if number or score in FAILURES else "crash")


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
