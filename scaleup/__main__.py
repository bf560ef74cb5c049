"""The command line of real runs: `scaleup plan`, `scaleup run` and `scaleup compare`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from scaleup.recipe import Recipe, RunSpec, load
from simlab.arguments import check_name
from simlab.config import ConfigError, RunError, Strict


class Plan(Strict):
    """Print layout, parameters, memory and tokens of a recipe; refuse what cannot fit."""

    recipe: Annotated[str, tyro.conf.Positional]
    """Name of a file in scaleup/recipes, or a path."""
    set: tuple[str, ...] = ()
    """Changes, each section.name=value as in TOML: training.steps=10 world.engine.count=2."""


class Run(Strict):
    """Run one method at one lag on real engines; the same command resumes at the last checkpoint."""

    recipe: Annotated[str, tyro.conf.Positional]
    """Name of a file in scaleup/recipes, or a path."""
    method: str | None = None
    """Label of one of the recipe's methods; the first by default."""
    lag: str | None = None
    """A lag regime as in `simlab compare`; the recipe's first by default."""
    seed: int = 0
    """Seed of weights, prompts and answers."""
    out: Path | None = None
    """Run folder, runs/<recipe>/<method>_lag<n>_<replay>_seed<n> by default."""
    set: tuple[str, ...] = ()
    """Changes, each section.name=value as in TOML: training.steps=10 world.engine.count=2."""


class Compare(Strict):
    """Run every method, lag, replay and seed of a recipe and write a report; finished runs are kept."""

    recipe: Annotated[str, tyro.conf.Positional]
    """Name of a file in scaleup/recipes, or a path."""
    out: Path | None = None
    """Folder, runs/<recipe> by default."""
    set: tuple[str, ...] = ()
    """Changes, each section.name=value as in TOML: training.steps=10 world.engine.count=2."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a problem is one sentence on stderr and exit code 2 (130 when stopped)."""
    words = sys.argv[1:] if arguments is None else arguments
    commands = {"plan": run_plan, "run": run_run, "compare": run_compare}
    if words[:1] in ([], ["-h"], ["--help"]):
        print(
            f"usage: scaleup {{{','.join(commands)}}} RECIPE [options]\n\nscaleup COMMAND --help explains one."
        )
        raise SystemExit(0 if words else 2)
    try:
        check_name("command", words[0], commands)
        commands[words[0]](words[1:])
    except (ConfigError, RunError, ValueError) as error:
        print(f"scaleup: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `scaleup plan NAME | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("\nscaleup: stopped; the same command goes on", file=sys.stderr)
        os._exit(130)


def read(options: Plan | Run | Compare) -> Recipe:
    """The recipe of a command with its changes."""
    import tomllib

    changes = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word!r} is not section.name=value")
        try:
            changes[name] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            words = {"true": True, "false": False}  # in Python's spelling too
            changes[name] = words.get(value.lower(), value)
    return load(options.recipe, changes)


def run_plan(words: list[str]) -> None:
    """`scaleup plan`."""
    options = tyro.cli(Plan, args=words, prog="scaleup plan")
    from scaleup.memory import plan

    print(plan(read(options)))


def run_run(words: list[str]) -> None:
    """`scaleup run`."""
    options = tyro.cli(Run, args=words, prog="scaleup run")
    recipe = read(options)
    arms = {arm.label: arm for arm in recipe.arms}
    label = options.method or recipe.arms[0].label
    if label not in arms:
        raise ConfigError(f"--method {label!r} is not among {', '.join(arms)}")
    lag = options.lag or recipe.lags[0]
    spec = RunSpec(
        recipe.world, recipe.training, arms[label], lag, recipe.world.replay[0], options.seed
    )
    out = options.out or Path("runs") / Path(options.recipe).stem / spec.name
    from scaleup.host import cluster
    from scaleup.memory import fits
    from scaleup.metrics import finished

    fits(recipe)
    if finished(out, spec):
        print(f"all steps were done before\n\nrun folder: {out}")
        return
    with cluster(recipe.world) as run:
        print(
            f"{'step':>5} {'reward':>7} {'d_bar':>8} {'age':>4} {'active':>7} {'queue':>6} {'s':>7}"
        )
        for row in run(spec, out):
            print(
                f"{row['step']:>5} {row['reward']:>7.3f} {row['d_bar']:>8.5f} {row['age_max']:>4} "
                f"{row['active']:>7.3f} {row['queue']:>6.2f} {row['seconds']:>7.1f}",
                flush=True,
            )
    print(f"\nrun folder: {out}")


def run_compare(words: list[str]) -> None:
    """`scaleup compare`."""
    options = tyro.cli(Compare, args=words, prog="scaleup compare")
    recipe = read(options)
    from scaleup.grid import compare
    from scaleup.memory import fits

    fits(recipe)
    out = options.out or Path("runs") / Path(options.recipe).stem
    for sentence in compare(recipe, Path(options.recipe).stem, out):
        print(f"- {sentence}")
    print(f"\nreport: {out / 'report.html'}")


if __name__ == "__main__":
    main()
