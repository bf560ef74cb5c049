"""The tasks by name, and their options checked before anything is started."""

from __future__ import annotations

from scaleup.tasks.math import Math
from scaleup.tasks.reasoning_gym import ReasoningGym
from scaleup.tasks.residue import Residue
from scaleup.tasks.task import Task
from simlab.core.arguments import call, check_call, check_name

TASKS = {"residue": Residue, "reasoning_gym": ReasoningGym, "math": Math}
OWN = {"tokenizer", "seed", "limit"}  # options that a run gives itself


def check_options(name: str, options: dict) -> None:
    """Raises ValueError for a task or options that do not exist."""
    check_name("task", name, TASKS)
    if own := OWN & options.keys():
        raise ValueError(f"task {name}: {min(own)} is not an option, the run sets it")
    check_call(f"task {name}", TASKS[name], None, **options)


def make(name: str, tokenizer=None, **options) -> Task:
    """The task of a name. Raises ValueError for a name or options that do not exist or do not fit."""
    check_name("task", name, TASKS)
    return call(f"task {name}", TASKS[name], tokenizer, **options)
