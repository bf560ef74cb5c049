"""What `simlab audit` and `simlab lookup` do with their options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from simlab.audit.audit import audit_tokens
from simlab.audit.compare import compare
from simlab.audit.folder import as_json, write_folder
from simlab.audit.lookup import lookup, of_audit
from simlab.audit.screen import show, show_difference, show_lookup
from simlab.stabilizers import bind
from simlab.study.specs import parse
from simlab.token_log.names import ROLES, Names
from simlab.token_log.pairs import read_tokens

CHECKOUT = Path(__file__).parents[2] / "reports"


def run(
    logs: Sequence[str],
    names: str,
    methods: Sequence[str] | None,
    out: Path | None,
    print_json: bool,
    join: str = "",
) -> int:
    """Audit a log, or the second of two against the first; show or print it, and return the exit code.

    Raises ValueError in one sentence.
    """
    specs = None if methods is None else [parse(x) for x in methods]
    arms = None if specs is None else [(label, name, own) for label, name, _, own in specs]
    for _, name, own in arms or []:
        bind(name, **own)  # a wrong name ends here, before a long log is read
    audits = []
    for log in logs:
        with bar(f"reading {log}") as move:
            tokens, on_rows = read_tokens(log, Names.of(names), tuple(ROLES), join, move)
        if len(tokens.mask) < 100_000:
            torch.set_num_threads(1)  # small tensors
        last = log is logs[-1]
        audits.append(audit_tokens(tokens, on_rows, log, arms if last else ()))
    audit = audits[-1]
    if len(audits) == 2:
        audit.result["compare"] = compare(*audits, methods=arms)
    if print_json:
        print(as_json(audit.result), end="")
        return audit.exit
    folder = out or Path("runs/audit") / Path(logs[-1]).name.partition(".")[0]
    write_folder(audit, folder)
    console = Console()
    show(audit, console)
    if len(audits) == 2:
        show_difference(audit.result["compare"], console)
    print(f"\nreport: {folder / 'report.html'}")
    return audit.exit


@contextmanager
def bar(title: str):
    """A bar on a terminal's stderr while a log of several parts is read; yields what moves it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(escape(title), total=None, visible=False)
        yield lambda done, total: shown.update(task, completed=done, total=total, visible=total > 1)


def run_lookup(
    d_bar: float | None,
    lag: float | None,
    audit: Path | None,
    reports: Path | None,
    print_json: bool,
) -> None:
    """Look a regime up and show it. Raises ValueError in one sentence."""
    if audit is not None:
        try:
            result = json.loads(audit.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{audit}: is not an audit.json ({error})") from error
        own = of_audit(result) if isinstance(result, dict) else (None, None)
        d_bar, lag = own[0] if d_bar is None else d_bar, own[1] if lag is None else lag
    for name, value in (("d_bar", d_bar), ("lag", lag)):
        if value is None:
            where = f"{audit} does not say it" if audit else "give it, or --from audit.json"
            raise ValueError(f"--{name.replace('_', '-')} is missing: {where}")
    folder = reports or next(filter(Path.is_dir, (Path("reports"), CHECKOUT)), CHECKOUT)
    nearest = lookup(folder, d_bar or 1e-9, lag or 0.0)
    if print_json:
        print(as_json(nearest), end="")
    else:
        show_lookup(nearest, Console())
