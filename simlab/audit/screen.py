"""An audit on one screen of a terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from simlab.audit.audit import Audit
from simlab.audit.checks import Check
from simlab.audit.methods import SHOWN

MARKS = {
    "unusable": ("UNUSABLE", "bold red"),
    "set aside": ("SET ASIDE", "bold yellow"),
    "alarm": ("ALARM", "bold red"),
    "note": ("note", "cyan"),
}
DIFFERENCE = "After minus before; the intervals hold at once with 95 %, over responses"
DIFFERENCE_HEADS = ("number", "before", "after", "difference", "interval", "verdict")
MOST, MOST_METHODS = 8, 20  # findings and methods on a screen


def show(audit: Audit, console: Console) -> None:
    """Findings first, then the numbers, then the methods."""
    r = audit.result
    counts = r["counts"]
    console.print(
        f"[bold]{escape(r['log'])}[/]: {counts['responses']:,} responses, {counts['sampled']:,} sampled tokens, "
        f"{counts['measured']:,} measured; d = {escape(r['columns'].get('trainer', ''))} - {escape(r['columns'].get('rollout', ''))}"
    )
    findings = audit.findings
    serious = [x for x in findings if x.status != "note"]
    if not serious and counts["measured"]:
        console.print(f"[green]Nothing fired.[/] {checked(audit)}")
    for finding in [*serious, *(x for x in findings if x.status == "note")][:MOST]:
        _finding(finding, console)
    if len(findings) > MOST:
        console.print(f"  and {len(findings) - MOST} more in audit.json")
    if serious:
        console.print(f"[dim]Quiet: {checked(audit)}[/]")
    for text in r.get("assumed", []):
        console.print(f"[dim]Assumed: {escape(text)}.[/]")
    if "mismatch" in r:
        console.print(numbers_line(r["mismatch"]))
    if r.get("methods"):
        console.print(_methods(r["methods"]))


def _finding(x: Check, console: Console) -> None:
    mark, colour = MARKS[x.status]
    where = f" [dim]({escape(x.place)})[/]" if x.place else ""
    console.print(f"[{colour}]{mark}[/] [bold]{escape(x.metric)}[/] {escape(x.sentence)}{where}")
    if x.next:
        console.print(f"    [dim]next:[/] {escape(x.next)}")


def checked(audit: Audit) -> str:
    """The names of the checks that did not fire, and of those that this log cannot answer."""
    quiet = ", ".join(x.metric for x in audit.checks if x.status == "quiet")
    cannot = ", ".join(x.metric for x in audit.checks if x.status == "not computable")
    return f"Checked: {quiet}." + (f" Not computable from this log: {cannot}." if cannot else "")


def numbers_line(m: dict) -> str:
    """The few numbers that people compare between runs."""
    names = ("d_bar", "d_mean", "d_q90", "d_q99", "d_max", "d_policy", "d_engine", "k1", "k3", "chi2", "ess", "mult_prob_error", "outside", "age")  # fmt: skip
    return "  ".join(f"[bold]{x}[/] {m[x]:.4g}" for x in names if x in m)


def _methods(rows: list[dict]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title="What each method does to these tokens, per cent",
        title_justify="left",
    )
    heads = (
        "method",
        "cut",
        "capped",
        "of outward",
        "of pull-back",
        "weight kept",
        "noise alone cuts",
        "acts",
    )
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=i == 0)
    own = rows if len(rows) <= MOST_METHODS else [x for x in rows if x["method"] in SHOWN]
    for row in own:
        if "not_computable" in row:
            table.add_row(row["method"], *["-"] * 6, "not computable")
            continue
        keys = ("cut", "capped", "cut_outward", "cut_pull_back", "weight_kept", "cut_by_noise")
        table.add_row(
            row["method"],
            *(percent(row.get(key)) for key in keys),
            "yes" if row["acts"] else "never here",
        )
    return table


def show_difference(difference: dict, console: Console) -> None:
    """What fired in one of two logs only, and how far each number moved."""
    console.print(
        f"\n[bold]{escape(difference['before'])}[/] against [bold]{escape(difference['after'])}[/]"
    )
    for title, key in (("gone", "gone"), ("new", "new"), ("still there", "still")):
        if difference[key]:
            console.print(f"{title}: {', '.join(difference[key])}")
    if "not_computable" in difference:
        console.print(f"No differences: {escape(difference['not_computable'])}.")
        return
    table = Table(box=None, pad_edge=False, title=DIFFERENCE, title_justify="left")
    for i, head in enumerate(DIFFERENCE_HEADS):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in difference_rows(difference):
        table.add_row(*row)
    console.print(table)


def difference_rows(difference: dict) -> list[list[str]]:
    """The rows of `compare` as text."""
    return [
        [x["name"], *(f"{x[key]:.4g}" for key in ("before", "after", "difference")),
         f"{x['low']:.3g} to {x['high']:.3g}" if np.isfinite(x["low"]) else "-", x["verdict"]]
        for x in difference["rows"]
    ]  # fmt: skip


def show_lookup(nearest: dict, console: Console) -> None:
    """The nearest studies, what each separated from its reference, and what none has data on."""
    console.print(f"Nearest to mean |d| {nearest['d_bar']:.3g} nats at lag {nearest['lag']:.3g}:")
    if not nearest["cells"]:
        console.print("no data: there is no study.")
    for cell in nearest["cells"]:
        console.print(
            f"\n[bold]{escape(cell['run'])}[/] at {escape(cell['at'])}: mean |d| {cell['d_bar']:.3g}, {cell['seeds']} seeds, against {escape(cell['reference'])}"
        )
        if cell["far"]:
            console.print(
                f"  [yellow]far[/]: a factor {cell['factor_d_bar']:.2g} in mean |d| and {cell['factor_lag']:.2g} in lag away, so this says little about your run"
            )
        for row in cell["separated"]:
            size = row.get("typical")
            told = f" (median difference {size:+.3g})" if isinstance(size, float) and np.isfinite(size) else ""  # fmt: skip
            console.print(f"  [bold]{row['verdict']}[/]: {escape(row['arm'])}{told}")
        if not cell["separated"]:
            console.print("  separated: none")
        rest = ", ".join(x["arm"] for x in cell["not_separated"])
        console.print(f"  not separated: {escape(rest) or 'none'}")
    console.print(f"\nno data: {', '.join(nearest['no_data']) or 'none'}")
    for text in nearest["left_out"]:
        console.print(f"[dim]Left out: {escape(text)}.[/]")


def percent(x: float | None) -> str:
    """A share in per cent, with digits where it is small."""
    return "-" if x is None else f"{100 * x:.3g}"
