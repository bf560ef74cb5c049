"""`simlab list KIND`: what can be named on the command line, with arguments, defaults and, for experiments, their cost."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable
from inspect import Parameter, cleandoc, getdoc, signature
from typing import Annotated, Any, NamedTuple

import tyro

from simlab.core.arguments import check_name, describe, settable
from simlab.study.command_line import parse
from simlab.study.strict import Strict

STEP = (
    3e-4  # seconds on two quiet cores a run and optimizer step of the default world: e1, catalogue
)


class Entry(NamedTuple):
    """One name of a registry."""

    name: str
    takes: str  # arguments with defaults
    about: str


def noises() -> list[Entry]:
    """Engine noise, as in --noise grid:dtype=fp8."""
    from simlab.simulator.noise import NOISES, STAGES

    stages = lambda x: (f for f in (getattr(x, stage, None) for stage in STAGES) if f)  # noqa: E731
    return [Entry(name, _takes(stages(x)), _first(x)) for name, x in NOISES.items()]


def lags() -> list[Entry]:
    """Lag regimes, as in --lags 8 fully_async:max_age=8; a number n is interval:n=n, and 0 is sync."""
    from simlab.lag import LAGS

    return [Entry(name, _fields(x), _first(x)) for name, x in LAGS.items()]


def tasks() -> list[Entry]:
    """Token MDPs, as in --task needle."""
    from simlab.simulator.tasks import TASKS

    return [Entry(name, "", _first(x)) for name, x in TASKS.items()]


def policies() -> list[Entry]:
    """Policies of the token MDP, as in --policy tabular."""
    from simlab.simulator.policies import POLICIES

    return [Entry(name, "", _first(x)) for name, x in POLICIES.items()]


def presets() -> list[Entry]:
    """Published pairs of advantage and aggregation, as in --preset dr_grpo."""
    from simlab.core.advantages import PRESETS

    pairs = {k: ", ".join(f"{a} {b}" for a, b in x.items()) for k, x in PRESETS.items()}
    return [Entry(name, "", about) for name, about in pairs.items()]


def advantages() -> list[Entry]:
    """Rewards of a group to advantages, as in --advantage rloo."""
    from simlab.core.advantages import ADVANTAGES

    return [Entry(name, _takes([f]), _first(f)) for name, f in ADVANTAGES.items()]


def aggregations() -> list[Entry]:
    """How per-token terms become a loss, as in --aggregation seq_mean_token_mean."""
    from simlab.core.aggregate import AGGREGATIONS

    return [Entry(name, _takes([f]), _first(f)) for name, f in AGGREGATIONS.items()]


def experiments() -> list[Entry]:
    """Questions with settings, as in --experiment e0; minutes are rough, of two quiet cores."""
    from simlab.simulator.experiments import EXPERIMENTS

    return [Entry(x, cost(x), EXPERIMENTS[x].QUESTION) for x in EXPERIMENTS]


def cost(experiment: str) -> str:
    """The number of runs of an experiment, and roughly its minutes."""
    from simlab.simulator.config import Config, WorldSpec
    from simlab.simulator.experiments import EXPERIMENTS
    from simlab.simulator.sweep import points

    settings = {"sweep": ()} | EXPERIMENTS[experiment].SETTINGS
    config = Config(**settings | {"sweep": ()})  # one point: to check all of them takes seconds
    there = [x for _, x in points(settings["sweep"], config.model_dump())]
    runs, seconds = len(config.plan) * config.seeds, 0.0
    for point in there:
        size = WorldSpec(**point["world"]).largest / WorldSpec().largest
        seconds += runs * point["training"]["steps"] * STEP * max(size, 0.5)
    runs *= len(there)
    minutes = f"{seconds / 60:.0f}" if seconds >= 90 else "1"
    return f"{runs:,} runs, about {minutes} minute{'s' * (minutes != '1')}"


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "noises": noises, "lags": lags, "tasks": tasks, "policies": policies, "presets": presets,
    "advantages": advantages, "aggregations": aggregations, "experiments": experiments,
}  # fmt: skip


class List(Strict):
    """Print the names of a kind with their arguments and defaults; without a kind, all of them but experiments."""

    kind: Annotated[str | None, tyro.conf.Positional] = None
    """noises, lags, tasks, policies, presets, advantages, aggregations or experiments (with their cost). The methods are `simlab methods`."""
    print_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON: name, takes and about of every entry, by kind."""


def run_list(words: list[str]) -> None:
    """`simlab list`."""
    options = parse(List, words, "simlab list")
    if options.kind is not None:
        check_name("kind", options.kind, KINDS)
    kinds = [options.kind] if options.kind else [x for x in KINDS if x != "experiments"]
    found = {kind: KINDS[kind]() for kind in kinds}
    if options.print_json:
        print(json.dumps({kind: [x._asdict() for x in all_] for kind, all_ in found.items()}))
        return
    print("\n\n".join(shown(kind, entries) for kind, entries in found.items()))


def shown(kind: str, entries: list[Entry]) -> str:
    """The entries of a kind as text, no wider than the terminal."""
    width = min(shutil.get_terminal_size().columns, 110)
    indent = max(len(x.name) for x in entries) + 2
    lines = [f"{kind}: {cleandoc(KINDS[kind].__doc__ or '')}"]
    for x in entries:
        text = f"{x.name:{indent}}{x.about}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * indent)
        lines += [f"{'':{indent}}{x.takes}"] if x.takes else []
    return "\n".join(lines)


def _first(x: object) -> str:
    """The first paragraph of a docstring."""
    text = " ".join((getdoc(x) or "").split("\n\n")[0].split())
    return text.removeprefix(f"{getattr(x, '__name__', '').rpartition('.')[2]}: ")


def _takes(functions: Iterable[Callable[..., Any]]) -> str:
    """`name=default (what it may be)` of the keyword-only arguments."""
    said = {}
    for function in functions:
        known = signature(function).parameters
        for name, kinds in settable(function).items():
            default = known[name].default
            value = "required" if default is Parameter.empty else _text(default)
            said[name] = f"{name}={value} ({describe(kinds)})"
    return ", ".join(said.values())


def _fields(kind: type) -> str:
    """`name=default` of the arguments of a lag regime."""
    known = signature(kind).parameters.values()
    return ", ".join(
        f"{x.name}={'required' if x.default is Parameter.empty else _text(x.default)}"
        for x in known
    )


def _text(default: object) -> str:
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
