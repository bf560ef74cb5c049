"""The command line: `simlab compare`, `simlab methods`, `simlab verify` and `simlab audit`."""

from __future__ import annotations

from collections.abc import Callable

from simlab.study.command_line import run

COMMANDS = ("compare", "methods", "verify", "audit")


def load(name: str) -> Callable[[list[str]], None]:
    """The function of a command; loads what the commands need."""
    from simlab import commands

    return getattr(commands, f"run_{name}")


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a problem is one sentence on stderr and exit code 2 (130 when stopped)."""
    run("simlab", COMMANDS, load, "compare", arguments)


if __name__ == "__main__":
    main()
