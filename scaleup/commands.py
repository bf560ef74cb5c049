"""What `scaleup plan`, `scaleup run` and `scaleup compare` take, do and print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import polars as pl
import tyro
from pydantic import Field

from scaleup.recipe import Recipe, RunSpec, load
from simlab.study.command_line import parse
from simlab.study.strict import ConfigError, Strict


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
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of weights, prompts and responses."""
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
    options = parse(Plan, words, "scaleup plan")
    from scaleup.plan.table import plan

    print(plan(read(options)))


def run_run(words: list[str]) -> None:
    """`scaleup run`."""
    options = parse(Run, words, "scaleup run")
    recipe = read(options)
    arms = {arm.label: arm for arm in recipe.arms}
    label = options.method or recipe.arms[0].label
    if label not in arms:
        raise ConfigError(f"--method {label!r} is not among {', '.join(arms)}")
    lag = options.lag or recipe.lags[0]
    world = recipe.world
    try:
        spec = RunSpec(world, recipe.training, arms[label], lag, world.replay[0], options.seed)
    except ValueError as error:
        raise ConfigError(f"--lag {lag}: {error}") from error
    out = options.out or Path("runs") / Path(options.recipe).stem / spec.name
    from scaleup.plan.memory import fits
    from scaleup.run.metrics import FILES
    from simlab.study.folder import claimed

    fits(recipe)
    with claimed(out, FILES):
        _run(spec, out, options.recipe)
    print(f"run folder: {out}")


def _run(spec: RunSpec, out: Path, recipe: str) -> None:
    """Train what is missing, a line a step, and what is to be said of the whole."""
    from scaleup.run.closing import closing
    from scaleup.run.cluster import cluster
    from scaleup.run.metrics import finished
    from scaleup.run.metrics import read as rows_of
    from simlab.study.findings import of_run

    if finished(out, spec):
        print("all steps were done before")
    else:
        print("starting Ray, engines and trainer: a minute or two until the first step", flush=True)
        with cluster(spec.world) as run:
            print(
                f"{'step':>5} {'reward':>7} {'d_bar':>8} {'age':>4} {'active':>7} {'queue':>6} {'s':>7}"
            )
            for i, row in enumerate(run(spec, out)):
                if i == 0 and row["step"]:
                    print(f"resumed at step {row['step']}")
                print(
                    f"{row['step']:>5} {row['reward']:>7.3f} {row['d_bar']:>8.5f} {row['age_max']:>4} "
                    f"{row['active']:>7.3f} {row['queue']:>6.2f} {row['seconds']:>7.1f}",
                    flush=True,
                )
    rows = pl.DataFrame(rows_of(out / "metrics.jsonl"), infer_schema_length=None)
    if said := of_run(rows, spec.training.lr):
        print(f"\n{said}")
    print(f"\n{closing(rows, recipe)}")


def run_compare(words: list[str]) -> None:
    """`scaleup compare`."""
    options = parse(Compare, words, "scaleup compare")
    recipe = read(options)
    from scaleup.compare.compare import compare
    from scaleup.plan.memory import fits

    fits(recipe)
    out = options.out or Path("runs") / Path(options.recipe).stem
    for sentence in compare(recipe, Path(options.recipe).stem, out):
        print(f"- {sentence}")
    print(f"\nreport: {out / 'report.html'}")
