"""The command line: `simlab compare`, `simlab list`, `simlab show` and the others of COMMANDS."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from simlab.study.command_line import run

COMMANDS = {  # what `simlab --help` says of each
    "compare": "run an experiment, or methods, lags and seeds of your own; writes a run folder (minutes)",
    "methods": "the stabilizers: formula, source, arguments, what they gate; --plot draws their weights",
    "list": "noises, lags, tasks, policies, presets, advantages, aggregations, experiments and their cost",
    "new": "write a method or an advantage of your own that keeps the promises, to start from",
    "conform": "is my loss the same function as a method, value and gradient; shows where it is not",
    "show": "the table of a run folder on the terminal, or as JSON",
    "figure": "one figure of a run folder, in the size and format of your paper",
    "diff": "which settings, arms and numbers differ between two run folders",
    "promote": "may a method go from the simulator to real engines: criteria with numbers, and its next recipe",
    "verify": "check the claims of theory/ exactly and attack them (a minute)",
    "audit": "what is wrong with a rollout log, and what each method would do to its tokens; or of two logs",
    "lookup": "which corrections the studies nearest to a mean |d| and a lag separated from PPO",
}
PLACES = {
    "list": "simlab.tools.listing",
    "new": "simlab.tools.skeleton",
    "conform": "simlab.tools.conform",
    "show": "simlab.tools.folders",
    "figure": "simlab.tools.figure",
    "diff": "simlab.tools.folders",
    "promote": "simlab.tools.promote",
    "audit": "simlab.audit.options",
    "lookup": "simlab.audit.options",
}


def load(name: str) -> Callable[[list[str]], None]:
    """The function of a command; loads what the command needs."""
    return getattr(import_module(PLACES.get(name, "simlab.commands")), f"run_{name}")


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a problem is one sentence on stderr and exit code 2 (130 when stopped)."""
    run("simlab", COMMANDS, load, "compare", arguments)


if __name__ == "__main__":
    main()
