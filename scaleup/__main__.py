"""The command line of real runs: `scaleup plan`, `scaleup run` and `scaleup compare`."""

from __future__ import annotations

import os
from collections.abc import Callable

from simlab.study.command_line import run

COMMANDS = ("plan", "run", "compare")


def load(name: str) -> Callable[[list[str]], None]:
    """The function of a command; loads what the commands need."""
    from scaleup import commands

    return getattr(commands, f"run_{name}")


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a problem is one sentence on stderr and exit code 2 (130 when stopped)."""
    run(
        "scaleup", COMMANDS, load, "engines", arguments, os._exit
    )  # threads of an engine do not end


if __name__ == "__main__":
    main()
