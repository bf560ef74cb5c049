"""Cards of the stabilizers: what their docstrings say, and what probing them shows.

Inputs and gates are measured, not declared: a field is needed if its absence is an error; a token is
cut if its advantage is not 0 and its log-prob gets no gradient, reweighted if its gradient weight
differs from the importance weight r A. Outward tokens (A d > 0) move pi further from mu.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from inspect import Parameter, cleandoc, signature
from typing import NamedTuple

import torch

from simlab.arguments import required, settable
from simlab.batches import graded, ragged
from simlab.stabilizers import STABILIZERS, Stabilizer, bind, needs, parts
from simlab.tokens import log_ratio, on_mask, ratio

GUESS = 0.5  # for an argument without a published value, here only


class Card(NamedTuple):
    """One line of the table."""

    name: str
    formula: str
    source: str
    arguments: str  # with defaults
    inputs: str  # optional fields of TokenBatch that it reads
    whole_batch: str  # numbers of the whole optimizer batch
    cut: str  # which side loses its gradient
    reweighted: str  # which side keeps a gradient of another size


HEADER = Card(
    "method", "surrogate", "source", "arguments (default)", "reads besides log-probs",
    "of the whole batch", "cut", "reweighted",
)  # fmt: skip


def card(name: str) -> Card:
    """The card of a registered method. Raises ValueError for an unknown name."""
    missing = [x for function in parts(name).values() for x in required(function)]
    stabilizer = bind(name, **dict.fromkeys(missing, GUESS))
    doc = cleandoc(STABILIZERS[name].__doc__ or f"{name}: no docstring.")
    first, _, rest = doc.partition("\n")
    source = next((p for p in rest.split("\n\n") if p.strip().startswith("Source:")), "")
    source = " ".join(source.replace("Source:", "").split()).rstrip(".")
    cut, reweighted = gates(stabilizer)
    return Card(
        name,
        first.partition(": ")[2].rstrip("."),
        source or "not given",
        ", ".join(arguments(name)) or "none",
        ", ".join(needs(stabilizer)) or "-",
        ", ".join(stabilizer.stats([ragged()])) or "-",
        cut,
        reweighted,
    )


def arguments(name: str) -> list[str]:
    """`name=default` of every hyper-parameter; "required" where none was ever published."""
    found = {}
    for function in parts(name).values():
        for key in settable(function):
            default = signature(function).parameters[key].default
            found[key] = "required" if default is Parameter.empty else default
    return [f"{key}={value}" for key, value in found.items()]


def gates(stabilizer: Stabilizer) -> tuple[str, str]:
    """Which sides are cut and which reweighted: outward, pull-back, both or neither ("-")."""
    seen = {"cut": set(), "reweighted": set()}
    for seed in range(8):
        b = ragged(seed, sizes=(1, 2, 3, 5, 8, 13, 21), masked=0.0)
        if seed % 2:  # some rules act only on a batch that is far off as a whole
            b = replace(b, logp=(b.logp_mu + 4 * log_ratio(b)).clamp(max=-0.01))
        _, w = graded(stabilizer, b)
        d, A = log_ratio(b), on_mask(b, b.advantage)
        plain = ratio(d) * A
        moved = (A * d).abs() > 1e-9
        kinds = {
            "cut": moved & (w == 0),
            "reweighted": moved & (w != 0) & ~torch.isclose(w, plain, rtol=1e-9, atol=0),
        }
        for kind, found in kinds.items():
            sides = {"outward": A * d > 0, "pull-back": A * d < 0}
            seen[kind] |= {side for side, of in sides.items() if bool((found & of).any())}
    words = {0: "-", 2: "both"}
    return tuple(words.get(len(x), next(iter(x), "-")) for x in seen.values())


def listing(width: int = 100) -> str:
    """Every card as a few lines of text."""
    lines = []
    for name in STABILIZERS:
        shown = card(name)
        lines += textwrap.wrap(f"{name:12}{shown.formula}", width, subsequent_indent=" " * 12)
        for word, value in (
            ("source", shown.source), ("takes", shown.arguments), ("reads", shown.inputs),
            ("of the whole batch", shown.whole_batch), ("cuts", shown.cut),
            ("reweights", shown.reweighted),
        ):  # fmt: skip
            if value != "-":
                lines += textwrap.wrap(f"{'':12}{word}: {value}", width, subsequent_indent=" " * 14)
    lines += [
        "",
        "cuts: tokens on that side lose their gradient; reweights: they keep one of another size.",
    ]
    return "\n".join([*lines, "simlab methods NAME prints the page of one, with its doubts.", ""])


def page(name: str) -> str:
    """The docstring of a method and its card, as text."""
    shown = card(name)
    lines = [f"{title:24} {value}" for title, value in zip(HEADER[3:], shown[3:], strict=True)]
    return "\n".join([cleandoc(STABILIZERS[name].__doc__ or name), "", *lines])


def markdown() -> str:
    """docs/methods.md."""
    rows = [HEADER, *(card(name) for name in STABILIZERS)]
    cells = [[x.replace("|", "\\|") for x in row] for row in rows]
    table = [f"| {' | '.join(row)} |" for row in cells]
    table.insert(1, "|" + " --- |" * len(HEADER))
    text = cleandoc(__doc__).split("\n\n")[1]
    return "\n".join(
        ["# Stabilizers", "", "Written by `simlab methods --markdown`. " + " ".join(text.split()),
         "The measures are taken at the default arguments on heavy-tailed batches, log-ratios up to a "
         "few nats; `simlab methods NAME` prints one page.", "", *table, ""]
    )  # fmt: skip
