"""What `simlab compare`, `simlab methods` and `simlab verify` take, do and print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simlab.core.advantages import PRESETS
from simlab.simulator.config import Config
from simlab.simulator.experiments import EXPERIMENTS
from simlab.simulator.layers import layered, merge
from simlab.study.command_line import parse, stop, stop_code
from simlab.study.folder import read_toml
from simlab.study.strict import Command, ConfigError


class Compare(Command):
    """Compare stabilizers on the token MDP and write a run folder with report.html.

    Options win over the --config file, which wins over --preset and --quick, which win over the
    experiment.
    """

    experiment: Literal[tuple(EXPERIMENTS)] = "e1"
    """The question: e0 (the regime map), e1 (who fails as lag grows), e2 (Adam and gradient clip), e3 (where SAT acts), clip_cost (what cutting costs), null (learning rate 0), catalogue and catalogue_adam (all methods), centering and centering_adam (score centering by lag and noise), pull_back (a dual clip on every method), lag_range (where ranges close), sat_kernel, sat_gates and sat_scope (variants of SAT where it acts), tasks, horizon and features (what survives another world)."""
    config: Path | None = None
    """A TOML file with the keys of a run's config.toml, its experiment included."""
    quick: bool = False
    """A small version: lags 1 and 8, 12 seeds, 60 steps."""
    preset: Literal[tuple(PRESETS)] | None = None
    """A published pair of advantage and aggregation."""
    out: Path | None = None
    """Run folder, runs/<experiment> by default (runs/<experiment>-quick with --quick)."""
    workers: Annotated[int, Field(ge=1, le=256)] = min(os.cpu_count() or 1, 256)
    """Processes, one thread each."""
    token_log: Path | None = None
    """Folder for every sampled token of the logged steps (docs/token_log.md), a folder an arm, lag and block of seeds. Cells that are finished already write none."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()


def run_compare(words: list[str]) -> None:
    """`simlab compare`."""
    options = parse_compare(words)
    for note in options.settings.notes:
        print(f"simlab: {note}", file=sys.stderr)
    from simlab.simulator.compare import compare  # after parsing: a wrong option answers at once

    name = options.experiment + ("-quick" if options.quick else "")
    out = options.out or Path("runs") / name
    try:
        with progress_bar(f"simlab compare {name}") as progress:
            table = compare(
                options.settings,
                options.experiment,
                out,
                options.workers,
                progress,
                options.token_log,
            )
    except KeyboardInterrupt as error:
        print(
            f"\nstopped; finished cells are kept in {out}, the same command resumes",
            file=sys.stderr,
        )
        os._exit(stop_code(error))
    from simlab.simulator import regimes, report

    ranges = regimes.of_folder(options.settings, out) if options.settings.axes else None
    for sentence in report.sentences(options.settings, ranges, table):
        print(f"- {sentence}")
    print(f"\nreport: {out / 'report.html'}")


class Methods(Command):
    """List the stabilizers: formula, source, arguments, what they read, which side they gate."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """One method, a composition (gspo+tis, pg+keep:gate=tv,max=0.1), or a file with your own (it is checked first); its page is printed."""
    markdown: bool = False
    """Print the table of docs/methods.md."""
    plot: Path | None = None
    """Draw the weight w(d) of the method beside PPO's into this file (png, svg or pdf); without a method, of all."""


def run_methods(words: list[str]) -> None:
    """`simlab methods`."""
    options = parse(Methods, words, "simlab methods")
    import torch

    from simlab.contract import cards as methods
    from simlab.contract.promises import check
    from simlab.stabilizers import bind, load
    from simlab.study.specs import parse as parse_spec

    torch.set_num_threads(1)  # the batches are tiny
    bound = None
    if (name := options.name) is not None:
        if name.endswith(".py"):
            name = load(Path(name))
            check(bind(name))
        _, name, _, arguments = parse_spec(name)
        bound = bind(name, **arguments) if arguments or "+" in name else None
    if options.plot is not None:
        from simlab.tools.weights import save

        save(options.plot, bound if name is None or bound else bind(name))
        print(options.plot)
    elif name is not None:
        print(methods.page_of(bound) if bound else methods.page(name))
    elif options.markdown:
        print(methods.markdown(), end="")
    else:
        print(methods.listing(), end="")


class Verify(Command):
    """Check every claim of theory/ exactly, attack it, and write a folder with report.html."""

    out: Path = Path("runs/verify")
    """Folder for claims.json, report.html and figures."""
    budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Multiple of the 2,000 tries per inequality; 1 takes about a minute, 100 about two hours."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of instances and searches."""
    runs: Path | None = None
    """A run folder of simlab compare whose logged exact values join the report."""
    claim_file: Path | None = None
    """A Python file with a claim of your own, attacked instead of the others (docs/claims.md)."""
    claim: int | None = None
    """With --instance: the claim to check."""
    instance: Path | None = None
    """A JSON instance to check alone, such as the counterexample that a violated claim leaves."""


def run_verify(words: list[str]) -> None:
    """`simlab verify`; exit code 1 if a claim is violated."""
    options = parse(Verify, words, "simlab verify", config=(tyro.conf.OmitArgPrefixes,))
    from simlab.verify.run import check, verify

    if (options.claim is None) != (options.instance is None):
        raise ValueError("--claim and --instance go together")
    if options.instance is not None:
        lines = check(options.claim, options.instance, options.claim_file)
        print("\n".join(lines))
        raise SystemExit(int(any(line.startswith("VIOLATED") for line in lines)))
    try:
        with progress_bar("simlab verify") as progress:
            results = verify(
                options.out,
                options.budget,
                options.seed,
                options.runs,
                options.claim_file,
                progress,
            )
        failed = [f for f in results if f.violations]
        said = []
        for f in results:
            tightest = max(f.largest.values(), default=None)
            note = f", tightest {tightest:.4f}" if tightest is not None else ""
            said.append(
                f"claim {f.claim:2}: {f.tried:6} instances, {f.violations} violations{note}  {f.title}"
            )
        for f in failed:
            if f.counterexample is not None:
                path = options.out / f"counterexample-{f.claim}.json"
                path.write_text(json.dumps(f.counterexample))
                own = f"--claim-file {options.claim_file} " if options.claim_file else ""
                said.append(
                    f"claim {f.claim} is violated: simlab verify {own}--claim {f.claim} --instance {path}"
                )
    except OSError as error:
        stop("simlab", f"{options.out}: cannot be written ({error.strerror or error})")
    print("\n".join([*said, f"\nreport: {options.out / 'report.html'}"]))
    raise SystemExit(int(bool(failed)))


@contextmanager
def progress_bar(title: str):
    """A bar with the time left on a terminal's stderr; yields the function that moves it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def move(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{title} {what}".strip())

        yield move


def parse_compare(words: list[str]) -> Compare:
    """Options over TOML over quick over experiment; SystemExit or ValueError before anything runs."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--experiment")
    first.add_argument("--config", type=Path)
    first.add_argument("--quick", action="store_true")
    first.add_argument("--preset")
    first.add_argument("--noise", nargs="*")
    first.add_argument("--noise-from")
    try:
        early, _ = first.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    own = read_toml(early.config) if early.config else {}
    name = early.experiment or own.get("experiment", "e1")
    settings = merge(
        layered(name, early.quick, early.preset),
        {k: v for k, v in own.items() if k != "experiment"},
    )
    if early.noise is not None and early.noise_from is None:
        settings.pop("noise_from", None)  # an option wins over the file that would replace it
    try:
        base = Compare(experiment=name, settings=Config(**settings))
    except ConfigError as error:
        raise ConfigError(f"{early.config}: {error}" if own else str(error)) from error
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return parse(Compare, words, "simlab compare", default=base, config=style)
