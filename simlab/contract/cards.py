"""Cards of the stabilizers: what their docstrings say, and what probing them shows.

Inputs and gates are measured, not declared: a field is needed if its absence is an error; a token is
cut if its advantage is not 0 and its log-prob gets no gradient, reweighted if its gradient weight
differs from the importance weight r A. Outward tokens (A d > 0) move pi further from mu. Constants
are factors of S that depend on log pi and keep no gradient, told by finite differences.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from inspect import Parameter, cleandoc, signature
from typing import NamedTuple

import torch

from simlab.contract.batches import graded, graded_head, ragged
from simlab.contract.gradients import directions, follows, linear
from simlab.core.arguments import describe, required, settable
from simlab.core.tokens import log_ratio, on_mask, ratio
from simlab.stabilizers import STABILIZERS, Stabilizer, bind, needs, parts, terms

GUESS = 0.5  # for an argument without a published value, here only


# methods that are known and not built, and what is missing
NOT_BUILT = {
    "R2VPO (2601.03320, 2605.26784)": "the dual step of lambda in S = r A - lambda (r - 1)^2",
    "AIS (2605.13907)": "the map from reliability, divergence and variance to the mixture of r and 1",
    "QUATRO (2602.04620)": "the formula of its trust region for each prompt",
    "PSPO": "a source read; noted as w = (1 - a) r A",
    "RGPO (2604.14895)": "a source that can be trusted; noted as w = g'(r) r A for a smooth gate g",
    "clamp(rho)/rho": "any formula: none stands where it is said to",
    "GIPO (2603.03955)": "the width of its Gaussian weight of the log-ratio",
    "gpg": "nothing: it is `none`",
    "pmd_mean (2602.05933)": "nothing: `regression` at level sequence with tau = 1/t, times 1/t",
    "TBA (2503.18929), AGRO (2503.19612)": "formula and constants read in the source, noted from memory",
    "UP-GRPO (2607.06987), LOCAL": "a reading of verl's later losses `up` and `local`",
    "PNPO (2608.01418), CPPO (2606.10968)": "the thresholds of prefix mean and prefix budget",
    "StableReinforce": "everything: it is undisclosed",
    "REC (2509.24203)": "its masks `two-side`, `one-side` and `ring` as one correction",
    "BRACE's critic": "a critic, which no world here has",
    "freshness-weighted sampling": "nothing of a loss: a queue that draws by 1/(age + 1)",
    "learning rate by response length (2602.01826)": "nothing of a loss: a schedule",
    "GAC (2603.01501)": "its regimes of the cosine of consecutive gradients and their thresholds; the cosine is logged (`grad_cosine`)",
}


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
    constants: str  # which factors of S keep no gradient


HEADER = Card(
    "method", "surrogate", "source", "arguments (default)", "reads besides log-probs",
    "of the whole batch", "cut", "reweighted", "constants in S",
)  # fmt: skip


def card(name: str) -> Card:
    """The card of a registered method. Raises ValueError for an unknown name."""
    missing = [x for function in parts(name).values() for x in required(function)]
    return card_of(bind(name, **dict.fromkeys(missing, GUESS)), ", ".join(arguments(name)))


def card_of(stabilizer: Stabilizer, takes: str) -> Card:
    """The card of a method, or of a composition, as it is bound."""
    doc = stabilizer.doc or f"{stabilizer.name}: no docstring."
    _, _, rest = doc.partition("\n")
    source = next((p for p in rest.split("\n\n") if p.strip().startswith("Source:")), "")
    source = " ".join(source.replace("Source:", "").split()).rstrip(".")
    cut, reweighted = gates(stabilizer)
    return Card(
        stabilizer.name,
        stabilizer.formula,
        source or "not given",
        takes or "none",
        ", ".join(needs(stabilizer)) or "-",
        ", ".join(stabilizer.stats([ragged()])) or "-",
        cut,
        reweighted,
        constants(stabilizer),
    )


def arguments(name: str) -> dict[str, str]:
    """`name=default` of every hyper-parameter, "required" where none was ever published, and what it
    may be."""
    table = {}
    for function in parts(name).values():
        for key, kinds in settable(function).items():
            default = signature(function).parameters[key].default
            default = "required" if default is Parameter.empty else default
            table[f"{key}={default}"] = describe(kinds)
    return table


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
        for kind, tokens in kinds.items():
            sides = {"outward": A * d > 0, "pull-back": A * d < 0}
            seen[kind] |= {side for side, of in sides.items() if bool((tokens & of).any())}
    words = {0: "-", 2: "both"}
    cut, reweighted = (words.get(len(x), next(iter(x), "-")) for x in seen.values())
    return cut, reweighted


def constants(stabilizer: Stabilizer) -> str:
    """What of S depends on log pi and keeps no gradient: "-", "all but log pi" or "some".

    "-" where the gradient is the derivative of S by finite differences, the whole-batch numbers held;
    "all but log pi" where S is the gradient times log pi.
    """
    whole = alone = True
    for seed in range(4):
        b = ragged(seed, sizes=(*(1,) * 24, 2, 3, 5, 8, 13), masked=0.0, by_token=seed % 2 == 1)
        stats = stabilizer.stats([b])
        out, w = graded_head(stabilizer, b, **stats)
        whole &= follows(stabilizer, b, stats, directions(seed, b), None)
        alone &= torch.allclose(out.S, linear(b, w), rtol=1e-9)
    return "-" if whole else "all but log pi" if alone else "some"


def listing(width: int = 100) -> str:
    """Every card as a few lines of text."""
    lines, indent = [], max(map(len, STABILIZERS)) + 1
    for name in STABILIZERS:
        described = card(name)
        head = f"{name:{indent}}{described.formula}"
        lines += textwrap.wrap(head, width, subsequent_indent=" " * indent)
        for word, value in (
            ("source", described.source), ("takes", described.arguments), ("reads", described.inputs),
            ("of the whole batch", described.whole_batch), ("cuts", described.cut),
            ("reweights", described.reweighted), ("constants", described.constants),
        ):  # fmt: skip
            if value != "-":
                lines += textwrap.wrap(
                    f"{'':{indent}}{word}: {value}", width, subsequent_indent=" " * (indent + 2)
                )
    lines += [
        "",
        "cuts: tokens on that side lose their gradient; reweights: they keep one of another size;",
        "constants: factors of S that depend on log pi and keep no gradient.",
    ]
    return "\n".join([*lines, "simlab methods NAME prints the page of one, with its doubts.", ""])


def page(name: str) -> str:
    """The docstring of a registered method and its card, as text."""
    table = [f"{key:24} {may_be}" for key, may_be in arguments(name).items()]
    return "\n".join(
        [cleandoc(STABILIZERS[name].__doc__ or name), "", *_lines(card(name)), "", *table]
    )


def page_of(stabilizer: Stabilizer) -> str:
    """A method with other arguments, or a composition: what its parts do in words, and its card."""
    takes = ", ".join(f"{key}={value}" for key, value in stabilizer.settings.items())
    return "\n".join([stabilizer.doc, "", *_lines(card_of(stabilizer, takes))])


def _lines(shown: Card) -> list[str]:
    return [f"{title:24} {value}" for title, value in zip(HEADER[3:], shown[3:], strict=True)]


ALGEBRA = """## The algebra on a page

`base+term:argument=value+...` is a stabilizer like any other, on the command line, in TOML and in recipes:
`gspo+tis`, `ppo+icepop:low=0.5,high=5`, `pg+keep:gate=binary_kl,level=mean,max=0.003`. It is
S = W shape(L, A) + extras, where the base is the shape with its ratio L, and the terms give W.

- **Ratios.** k = prox/mu (the engine), u = pi/prox (training), r = pi/mu = k u. A method of the table has r; under a
  term that reads k, or with `base:proximal=step` (rollout, ewma, batch), it has u, and with `proximal=mu` it has r.
- **Law.** No factor counts twice: weigh by k on a method with a ratio, by r on `none`; `keep` never weighs unless
  told to. An unlawful composition is refused with the cure.
- **Order.** Every term looks at all active tokens, and caps never feed a rejection. W is the product, 0 where one term
  rejects; `norm` (over=accepted or all, level=token or response) divides it by its mean over the whole batch.
- **Denominator.** A rejected token stays in it. `denominator=drop` on a term takes it out of the mask (verl),
  `denominator=shrink` also out of the statistics of the terms behind (SkyRL).
- **Contraction.** `contract` (alpha, exponent, factor, shape as in SAT) finds SAT's c of every token, from the quantile
  of |d| over the whole batch, and c multiplies the radii of ppo, dppo, spo and drpo and divides the coefficient of `kl`:
  `ppo+contract` is `sat`. A method with an argument `shrink` takes part.
- **Support.** `support` renormalises pi on the tokens that mu can draw, where the head holds them all: the replay of a
  sampler that truncates.
- **Your own.** A method file with `correction(b, *, ...) -> Correction` is a term too.

`simlab methods SPEC` says what a composition does, and docs/conformance.md how options of frameworks are written. In braces below: the arguments.

| term | arguments (default) | what it does |
| --- | --- | --- |
"""


def term_rows() -> str:
    """The rows of the table of terms."""
    rows = []
    for name, function in terms().items():
        known = signature(function).parameters
        takes = [
            f"{key}={'required' if known[key].default is Parameter.empty else known[key].default}"
            for key in settable(function)
        ]
        said = " ".join(cleandoc(function.__doc__ or name).split("\n\n")[0].split())
        said = said.replace("|", "\\|")
        rows.append(f"| {name} | {', '.join(takes) or '-'} | {said} |")
    return "\n".join(rows) + "\n"


def markdown() -> str:
    """docs/methods.md."""
    rows = [HEADER, *(card(name) for name in STABILIZERS)]
    cells = [[x.replace("|", "\\|") for x in row] for row in rows]
    table = [f"| {' | '.join(row)} |" for row in cells]
    table.insert(1, "|" + " --- |" * len(HEADER))
    text = cleandoc(__doc__ or "").split("\n\n")[1]
    return "\n".join(
        ["# Stabilizers", "", "Written by `simlab methods --markdown`. " + " ".join(text.split()),
         "The measures are taken at the default arguments on heavy-tailed batches, log-ratios up to a "
         "few nats; `simlab methods NAME` prints one page.", "", *table, "",
         "## Known and not built", "", "| method | what is missing |", "| --- | --- |",
         *(f"| {name} | {missing} |" for name, missing in NOT_BUILT.items()), "", ALGEBRA + term_rows()]
    )  # fmt: skip
