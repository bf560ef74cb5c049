"""What both benchmarks share: interleaved timing in one process, one table for screen and Markdown."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table


def arguments(text: str) -> argparse.Namespace:
    """`--quick` and `--out FILE`; sets one thread and no denormals, as simlab compare does."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, a smoke test")
    parser.add_argument("--out", type=Path, help="also write the tables as Markdown")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    return parser.parse_args()


def interleave(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds per unit of each arm in each round `[rounds]`; an arm returns how many units it did.

    Every round runs every arm once, so that a change of the machine's speed hits all of them alike.
    """
    seconds = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    for _ in range(rounds):
        for name, arm in arms.items():
            start = time.perf_counter()
            units = arm()
            seconds[name].append((time.perf_counter() - start) / units)
    return {name: np.array(x) for name, x in seconds.items()}


def spread(ratio: np.ndarray) -> str:
    """Median over rounds, with the smallest and the largest."""
    return f"{np.median(ratio):.3g} ({ratio.min():.3g} - {ratio.max():.3g})"


class Report:
    """Tables, printed as they come; `write` keeps them as Markdown."""

    def __init__(self, title: str):
        header = machine()
        self.lines = [f"# {title}", "", header]
        self.console = Console(width=None if Console().is_terminal else 140, highlight=False)
        self.console.print(f"[bold]{title}[/]\n{header}")

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """One table; the first column is text, the others are numbers."""
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        rule = ["---"] + ["---:"] * (len(columns) - 1)
        self.lines += ["", f"## {title}", ""]
        self.lines += [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]

    def note(self, text: str) -> None:
        """A paragraph."""
        self.console.print(text)
        self.lines += ["", text]

    def write(self, path: Path | None) -> None:
        """The whole report to a file, if there is one to write."""
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(self.lines) + "\n")


def machine() -> str:
    """Versions, threads and load; no names of hosts or folders."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.partition(": ")[2] for x in lines if x.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    load = f"load average at the start {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return (
        f"torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} thread, {cpu}, {load}."
    )
