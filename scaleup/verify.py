"""Math answers checked in processes of their own, each with a deadline.

    judges = Judges(workers=2, timeout=10)
    judges([("1/2", r"So it is \\boxed{\\frac{1}{2}}.")])      # [1.0]
    judges.counts                                           # {"timeout": 0, "crash": 0, "unreadable": 0}

A symbolic comparison can take for ever, take all memory, or end its process. math-verify's own
time-outs are signals: they need a main thread and cannot end a loop inside of an extension. So a
process does one answer at a time, is killed at the deadline, and is replaced.
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

START = 180.0  # seconds a process may take to import its verifier
MEMORY = 4 * 2**30  # bytes of address space of one process
FAILURES = ("timeout", "crash", "unreadable")


def last_boxed(text: str) -> str:
    r"""The last closed \boxed{...} of a text with its braces, the innermost of nested ones; else the text."""
    found, opened = (-1, 0), []  # the last box that closes; starts of what is open
    for brace in re.finditer(r"\\boxed\{|[{}]", text):
        if brace[0] != "}":
            opened.append(brace.start() if len(brace[0]) > 1 else -1)
        elif opened:
            found = max(found, (opened.pop(), brace.end()))
    return text[slice(*found)] if found[0] >= 0 else text


def math_verify(answer: str, text: str, timeout: float) -> float | str:
    r"""1.0 where `text` ends in `answer`, by math-verify; runs in a process of Judges.

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
        found = parse(text, kinds, parsing_timeout=seconds, raise_on_error=True)
        return float(verify(gold, found, timeout_seconds=seconds, raise_on_error=True))
    except TimeoutException:
        return "timeout"


class Judge:
    """One process that scores one answer at a time; started when it is first needed."""

    def __init__(self, verifier: str, timeout: float, setup: dict | None):
        self.verifier, self.timeout, self.setup, self.process = verifier, timeout, setup, None

    def _ask(self, line: str, seconds: float) -> tuple[str, bool]:
        """What the process says to a line, "" if it ended; and whether it was killed at the deadline."""
        process, killed = self.process, []

        def kill():
            killed.append(True)
            process.kill()

        deadline = threading.Timer(seconds, kill)
        deadline.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            said = process.stdout.readline()
        except BrokenPipeError:
            said = ""
        finally:
            deadline.cancel()
            deadline.join()
        if killed or not said:
            self.close()
        return said, bool(killed)

    def __call__(self, answer: str, text: str) -> float | str:
        """The score, or the name of a failure. Raises RuntimeError if the process does not start."""
        if self.process is None:
            words = [self.verifier, str(self.timeout), json.dumps(self.setup)]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scaleup.verify", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            if not self._ask("", START)[0]:
                raise RuntimeError(
                    f"verify: {self.verifier} could not be started; its process wrote why"
                )
        said, killed = self._ask(json.dumps([answer, text]) + "\n", self.timeout + 1)
        return json.loads(said) if said else "timeout" if killed else "crash"

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # a line it did not read
                process.stdin.close()


class Judges:
    """A pool of processes. `timeout` in seconds holds for one answer.

    `verifier` is "module:function" of (answer, text, timeout) in a module that can be imported; it
    returns a score in [0, 1], or the name of a failure, and must score ("1", "1", ...) with 1. With
    `setup`, a dict of JSON, the function is called with it in each process and returns the verifier.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout: float = 10.0,
        verifier: str = "scaleup.verify:math_verify",
        setup: dict | None = None,
    ):
        self._free = queue.SimpleQueue()
        self._all = [Judge(verifier, timeout, setup) for _ in range(workers)]
        for judge in self._all:
            self._free.put(judge)
        self._threads = ThreadPoolExecutor(workers)
        self.counts = dict.fromkeys(FAILURES, 0)

    def _score(self, pair: tuple[str, str]) -> float | str:
        judge = self._free.get()
        try:
            return judge(*pair)
        finally:
            self._free.put(judge)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Scores of (answer, text) pairs, in order; a failure scores 0 and is counted by its name."""
        scores = []
        for found in self._threads.map(self._score, pairs):
            if isinstance(found, str):
                self.counts[found] += 1
            scores.append(0.0 if isinstance(found, str) else found)
        return scores

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(cancel_futures=True)
        for judge in self._all:
            judge.close()


def _serve(verifier: str, timeout: float, setup: dict | None) -> None:
    """Body of a process: a JSON line in, a JSON line out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's business
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

    # a verifier that is not there, or not at work, must not pass for wrong answers; imports are done here
    if setup is None and (found := verify("1", "1", START)) != 1:
        sys.exit(
            f"verify: {verifier} says {found!r} of the answer 1 to a problem with the answer 1"
        )
    reply("ready")
    for line in sys.stdin:
        # should the parent be gone: this much processor time ends the process, whatever it does
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * timeout + 10)
        try:
            found = verify(*json.loads(line), timeout)
        except MemoryError:
            raise  # a process that has no room left would fail on all that follows
        except Exception:
            found = "crash"
        number = isinstance(found, int | float) and 0 <= found <= 1
        reply(found if number or found in FAILURES else "crash")


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
