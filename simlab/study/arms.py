"""An arm of a comparison: a stabilizer with its arguments under a label."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from simlab.contract.batches import ragged
from simlab.core.tokens import log_ratio
from simlab.stabilizers import STABILIZERS, Stabilizer, bind, load, needs
from simlab.study.files import code_of
from simlab.study.specs import parse


@dataclass(frozen=True)
class Arm:
    """A stabilizer with arguments under a label; `stream` picks independent sampling draws."""

    label: str
    name: str
    arguments: tuple[tuple[str, object], ...] = ()
    stream: int = 0
    file: str | None = None  # of a user's own stabilizer

    @classmethod
    def parse(cls, spec: str) -> Arm:
        """From `[label=]name[@stream][:argument=value,...]`; raises ValueError in one sentence."""
        label, name, stream, arguments = parse(spec)
        arm = cls(label, name, tuple(sorted(arguments.items())), stream)
        bind(name, **arguments)
        return arm

    @property
    def stabilizer(self) -> Stabilizer:
        """The registry's function with these arguments."""
        if self.file is not None and self.name not in STABILIZERS:
            load(Path(self.file))  # a worker process has not seen it yet
        return bind(self.name, **dict(self.arguments))

    @property
    def rule(self) -> tuple[object, ...]:
        """What the arm does, whatever it is called: method, file, and every argument with its value."""
        values = self.stabilizer.settings | dict(self.arguments)
        return self.name, self.file, tuple(sorted(values.items(), key=str))

    @property
    def code(self) -> str | None:
        """A digest of the user's file and of what it imports beside it; None for the registry's own.

        Raises OSError if one cannot be read.
        """
        return code_of(self.file)

    def proximal(self, default: str) -> str | None:
        """Which pi_old the method reads: its own argument, else `default`, the training's; None if it reads none."""
        if not {"logp_prox", "entropy_prox"} & {*needs(stabilizer := self.stabilizer)}:
            return None
        own = stabilizer.arguments.get("proximal", "batch")
        return default if own == "batch" else own


def cannot_act(arm: Arm, training) -> str | None:
    """A sentence where a part of an arm has nothing to act on under these settings.Training, else None.

    With proximal = "mu" that is what corrects k = prox/mu; with "step" it may be the clip. There is one optimizer step a batch: pi_old just before the step is pi itself, and a clip on
    pi / pi_old sees nothing but 1. Found on a batch with log-ratios of a few nats.
    """
    proximal = arm.proximal(training.proximal)
    if proximal == "mu":
        return (
            f'{arm.label}: what it does with k = prox/mu cannot act, because proximal = "mu" makes pi_old '
            "the policy that sampled; its ratio is pi/mu"
        )
    if proximal != "step":
        return None
    b = ragged()
    b = replace(b, logp=(b.logp_mu + 4 * log_ratio(b)).clamp(max=-0.01))
    diagnostics = arm.stabilizer(replace(b, logp_prox=b.logp)).diagnostics
    clips = [x.value for name, x in diagnostics.items() if name.startswith("clip")]
    if not clips or any(bool((clip * b.mask).any()) for clip in clips):
        return None
    return (
        f'{arm.label}: its clip cannot act, because proximal = "step" with one optimizer step a batch '
        "makes pi_old the policy that is trained"
    )


def sentence(error: BaseException, file: str | Path | None = None) -> str:
    """An error in one line, with the last line of the user's file on its way, else of any file."""
    frames = traceback.extract_tb(error.__traceback__)
    at = _line(error, file) or "".join(f"{x.filename}, line {x.lineno}" for x in frames[-1:])
    return " ".join(f"{type(error).__name__}: {error} ({at})".split())


def _line(error: BaseException, file: str | Path | None) -> str | None:
    """The last line of a user's file that an error came through, with the file."""
    name = file and str(Path(file).resolve())
    lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == name]
    return f"{file}, line {lines[-1]}" if lines else None


@contextmanager
def user_code(file: str | Path | None) -> Iterator[None]:
    """Whatever a user's file raises, sys.exit included, becomes a ValueError of one line.

    A refusal that is a sentence already stays, with file and line if it came from within the file.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if file is None:
            raise
        if not isinstance(error, ValueError):
            raise ValueError(f"{file}: {sentence(error, file)}") from error
        if at := _line(error.__cause__ or error, file):
            raise ValueError(f"{error} ({at})") from error
        raise
