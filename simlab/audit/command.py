"""What `simlab audit` does with its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from simlab.audit.audit import audit_tokens
from simlab.audit.folder import as_json, write_folder
from simlab.audit.screen import show
from simlab.stabilizers import bind
from simlab.study.specs import parse
from simlab.token_log.names import ROLES, Names
from simlab.token_log.pairs import read_tokens


def run(
    log: str,
    names: str,
    methods: Sequence[str] | None,
    out: Path | None,
    print_json: bool,
    join: str = "",
) -> int:
    """Audit a log, show or print it, and return the exit code. Raises ValueError in one sentence."""
    specs = None if methods is None else [parse(x) for x in methods]
    arms = None if specs is None else [(label, name, own) for label, name, _, own in specs]
    for _, name, own in arms or []:
        bind(name, **own)  # a wrong name ends here, before a long log is read
    tokens, on_rows = read_tokens(log, Names.of(names), tuple(ROLES), join)
    if len(tokens.mask) < 100_000:
        torch.set_num_threads(1)  # small tensors
    audit = audit_tokens(tokens, on_rows, log, arms)
    if print_json:
        print(as_json(audit.result), end="")
        return audit.exit
    folder = out or Path("runs/audit") / Path(log).name.partition(".")[0]
    write_folder(audit, folder)
    show(audit, Console())
    print(f"\nreport: {folder / 'report.html'}")
    return audit.exit
