"""The command line: `simlab compare`, `simlab methods` and `simlab verify`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simlab.advantages import PRESETS
from simlab.arguments import check_name
from simlab.config import Config, ConfigError, RunError, Strict
from simlab.experiments import EXPERIMENTS

QUICK = {"lags": ("1", "8"), "seeds": 8, "training": {"steps": 60}}


class Compare(Strict):
    """Compare stabilizers on the token MDP and write a run folder with report.html.

    Options win over the --config file, which wins over --preset and --quick, which win over the
    experiment.
    """

    experiment: Literal[tuple(EXPERIMENTS)] = "e1"
    """The question: e1 (SGD), e2 (Adam and gradient clip), null (learning rate 0), catalogue and catalogue_adam (all methods)."""
    config: Path | None = None
    """A TOML file with the keys of a run's config.toml, its experiment included."""
    quick: bool = False
    """A small version: lags 1 and 8, 8 seeds, 60 steps."""
    preset: Literal[tuple(PRESETS)] | None = None
    """A published pair of advantage and aggregation."""
    out: Path | None = None
    """Run folder, runs/<experiment> by default (runs/<experiment>-quick with --quick)."""
    workers: Annotated[int, Field(ge=1, le=256)] = min(os.cpu_count() or 1, 256)
    """Processes, one thread each."""
    token_log: Path | None = None
    """Folder for every sampled token of the logged steps (docs/token_log.md), a folder an arm, lag and block of seeds. Cells that are finished already write none."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = Config()


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a problem is one sentence on stderr and exit code 2 (130 when stopped)."""
    words = sys.argv[1:] if arguments is None else arguments
    commands = {"compare": run_compare, "methods": run_methods, "verify": run_verify}
    if words[:1] in ([], ["-h"], ["--help"]):
        print(
            f"usage: simlab {{{','.join(commands)}}} [options]\n\nsimlab COMMAND --help explains one."
        )
        raise SystemExit(0 if words else 2)
    try:
        check_name("command", words[0], commands)
        commands[words[0]](words[1:])
    except (ConfigError, ValueError) as error:
        _stop(str(error))
    except BrokenPipeError:  # `simlab methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_compare(words: list[str]) -> None:
    """`simlab compare`."""
    options = parse_compare(words)
    from simlab.compare import compare  # after parsing: a wrong option answers at once

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
    except RunError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        print(
            f"\nstopped; finished cells are kept in {out}, the same command resumes",
            file=sys.stderr,
        )
        os._exit(130)
    from simlab.report import findings

    for sentence in findings(options.settings, table):
        print(f"- {sentence}")
    print(f"\nreport: {out / 'report.html'}")


class Methods(Strict):
    """List the stabilizers: formula, source, arguments, what they read, which side they gate."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """One method, or a file with your own (it is checked first); its page is printed."""
    markdown: bool = False
    """Print the table of docs/methods.md."""


def run_methods(words: list[str]) -> None:
    """`simlab methods`."""
    options = tyro.cli(Methods, args=words, prog="simlab methods")
    import torch

    from simlab import methods
    from simlab.contract import check
    from simlab.stabilizers import bind, load

    torch.set_num_threads(1)  # the batches are tiny
    if options.name is not None:
        name = options.name
        if name.endswith(".py"):
            name = load(Path(name))
            check(bind(name))
        print(methods.page(name))
    elif options.markdown:
        print(methods.markdown(), end="")
    else:
        print(methods.listing(), end="")


class Verify(Strict):
    """Check every claim of theory/ exactly, attack it, and write a folder with report.html."""

    out: Path = Path("runs/verify")
    """Folder for claims.json, report.html and figures."""
    budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Multiple of the 2,000 tries per inequality; 1 takes about a minute, 100 about two hours."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of instances and searches."""
    runs: Path | None = None
    """A run folder of simlab compare whose logged exact values join the report."""
    claim: int | None = None
    """With --instance: the claim to check."""
    instance: Path | None = None
    """A JSON instance to check alone, such as the counterexample that a violated claim leaves."""


def run_verify(words: list[str]) -> None:
    """`simlab verify`; exit code 1 if a claim is violated."""
    options = tyro.cli(
        Verify, args=words, prog="simlab verify", config=(tyro.conf.OmitArgPrefixes,)
    )
    from simlab.verify import check, verify

    if (options.claim is None) != (options.instance is None):
        raise ValueError("--claim and --instance go together")
    if options.instance is not None:
        lines = check(options.claim, options.instance)
        print("\n".join(lines))
        raise SystemExit(int(any(line.startswith("VIOLATED") for line in lines)))
    try:
        with progress_bar("simlab verify") as progress:
            found = verify(options.out, options.budget, options.seed, options.runs, progress)
        failed = [f for f in found if f.violations]
        for f in found:
            tightest = max(f.largest.values(), default=None)
            note = f", tightest {tightest:.4f}" if tightest is not None else ""
            print(
                f"claim {f.claim:2}: {f.tried:6} instances, {f.violations} violations{note}  {f.title}"
            )
        for f in failed:
            if f.counterexample is not None:
                path = options.out / f"counterexample-{f.claim}.json"
                path.write_text(json.dumps(f.counterexample))
                print(
                    f"claim {f.claim} is violated: simlab verify --claim {f.claim} --instance {path}"
                )
    except OSError as error:
        _stop(f"{options.out}: cannot be written ({error.strerror or error})")
    print(f"\nreport: {options.out / 'report.html'}")
    raise SystemExit(int(bool(failed)))


@contextmanager
def progress_bar(title: str):
    """A bar with the time left on stderr; yields the function that moves it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
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
    check_name("experiment", name, EXPERIMENTS)
    settings = merge(dict(EXPERIMENTS[name].SETTINGS), QUICK if early.quick else {})
    if early.preset is not None:
        check_name("preset", early.preset, PRESETS)
        settings = merge(settings, {"training": PRESETS[early.preset]})
    settings = merge(settings, {k: v for k, v in own.items() if k != "experiment"})
    if early.noise is not None and early.noise_from is None:
        settings.pop("noise_from", None)  # an option wins over the file that would replace it
    base = Compare(experiment=name, settings=Config(**settings))
    return tyro.cli(
        Compare,
        args=words,
        prog="simlab compare",
        default=base,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def merge(below: dict, above: dict) -> dict:
    """`above` wins, table by table."""
    tables = [k for k in above if isinstance(above[k], dict) and isinstance(below.get(k), dict)]
    return below | above | {k: merge(below[k], above[k]) for k in tables}


def read_toml(path: Path) -> dict:
    """The settings of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as TOML ({error})") from error


def _stop(sentence: str) -> None:
    print(f"simlab: {sentence}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
