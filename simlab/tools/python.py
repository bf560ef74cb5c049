"""`simlab.compare(...)`: what the command `simlab compare` does, from Python, as a table of polars."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from simlab.simulator.compare import compare as run
from simlab.simulator.config import Config, WorldSpec
from simlab.simulator.layers import layered, merge
from simlab.study.settings import Training

SECTIONS = {"training": Training, "world": WorldSpec}
LISTS = ("methods", "lags", "method_file", "noise", "sweep")


def compare(
    methods: Iterable[str] | None = None,
    lags: Iterable[str | int] | None = None,
    *,
    experiment: str = "e1",
    quick: bool = False,
    preset: str | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    **settings: Any,
) -> pl.DataFrame:
    """The summary table, a row an arm and lag, with the columns of docs/results.md.

    `settings` are the options of the command by their names: seeds, method_file, lr, steps, task, ...
    Without `out` the run folder is thrown away; with it, a stopped call goes on where it was. In a script
    the call stands under `if __name__ == "__main__":`, because workers are processes; `workers=1` takes none.
    Raises ConfigError, RunError or ValueError in one sentence.
    """
    given = {"methods": methods, "lags": lags} | settings
    above: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        section = next((x for x, kind in SECTIONS.items() if name in kind.model_fields), None)
        value = tuple(value) if name in LISTS and not isinstance(value, str | Path) else value
        above = merge(above, {section: {name: value}} if section else {name: value})
    config = Config(**merge(layered(experiment, quick, preset), above))
    workers = min(os.cpu_count() or 1, 256) if workers is None else workers
    if out is not None:
        return run(config, experiment, Path(out), workers)
    with TemporaryDirectory() as folder:
        return run(config, experiment, Path(folder) / "run", workers)
