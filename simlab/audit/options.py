"""What `simlab audit` and `simlab lookup` take; the work is loaded when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from simlab.study.command_line import parse
from simlab.study.strict import Command


class Audit(Command):
    """Audit a rollout log: can the two columns be compared, what is wrong, what each method would do.

    Writes audit.json and report.html. Exit code 0 clean, 1 alarms, 2 unusable, 3 partly unusable.
    """

    log: Annotated[str, tyro.conf.Positional]
    """A file, a folder or a glob of a log with trainer and rollout log-probs (docs/audit.md)."""
    after: Annotated[str | None, tyro.conf.Positional] = None
    """A second log, after a fix: it is audited, and compared with the first with intervals over responses."""
    map: str = ""
    """Columns by role, such as trainer=logp_train,rollout=logp_engine,mask=none."""
    join: str = ""
    """A second file about the same responses with the columns that the first lacks, such as the other side's; rows are joined by an id or by the ids of their tokens."""
    methods: tuple[str, ...] | None = None
    """Methods or compositions, as in simlab compare; all by default."""
    out: Path | None = None
    """Folder for audit.json and report.html, runs/audit/<name of the log> by default."""
    print_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print audit.json instead of the screen, and write nothing."""


def run_audit(words: list[str]) -> None:
    """`simlab audit`."""
    options = parse(Audit, words, "simlab audit")
    from simlab.audit.command import run

    raise SystemExit(
        run(
            [options.log, options.after] if options.after else [options.log],
            options.map,
            options.methods,
            options.out,
            options.print_json,
            options.join,
        )
    )


class Lookup(Command):
    """Which corrections were separated from PPO in the committed studies nearest to a regime (docs/audit.md)."""

    d_bar: Annotated[float | None, Field(gt=0)] = None
    """Mean |d| of the run, nats."""
    lag: Annotated[float | None, Field(ge=0)] = None
    """Its lag in optimizer steps."""
    audit: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """An audit.json, for what is not given: its mean |d| and mean age."""
    reports: Path | None = None
    """Folder of studies, reports/ of the working folder or of the checkout by default."""
    print_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON."""


def run_lookup(words: list[str]) -> None:
    """`simlab lookup`."""
    options = parse(Lookup, words, "simlab lookup")
    from simlab.audit.command import run_lookup as run

    run(options.d_bar, options.lag, options.audit, options.reports, options.print_json)
