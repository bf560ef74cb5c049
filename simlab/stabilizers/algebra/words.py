"""A composition in words: its page, put together from the docstrings of its parts."""

from __future__ import annotations

from inspect import signature

from simlab.stabilizers.algebra.compose import Parts

WORDS = {
    "of": {"k": "k = prox/mu", "r": "r = pi/mu", "u": "u = pi/prox"},
    "level": {
        "token": "token by token", "sum": "summed over the response", "sequence": "multiplied over the response",
        "mean": "the mean over the response", "geometric": "the geometric mean over the response",
        "prefix": "summed over the response up to the token", "running": "multiplied over the response up to the token",
        "min": "the smallest of the response", "max": "the largest of the response",
    },
    "gate": {
        "ratio": "ratio", "difference": "difference num - den", "tv": "distance |num - den|",
        "binary_kl": "Bernoulli KL D(den||num)", "reverse_kl": "Bernoulli KL D(num||den)",
    },
    "strict": {"False": "", "True": ", ends excluded"},
    "side": {"both": "", "outward": ", or it moves against the sign of A", "negative": ", or A >= 0"},
    "weight": {
        "None": "", "token": "; W is then the ratio of the token", "sum": "; W is then its product over the response",
        "mean": "; W is then its geometric mean over the response",
        "prefix": "; W is then its product over the response up to the token",
    },
}  # fmt: skip
OF_RATIOS = {"sum": "sequence", "mean": "geometric", "prefix": "running"}  # sums and means of logs
STAY = {
    "keep": "stay in the denominator of the loss",
    "drop": "leave the mask: the denominator, and the statistics of the base",
    "shrink": "leave the mask at once: the denominator, the statistics of the base and of what follows",
}


def in_words(function, arguments: dict) -> str:
    """The first paragraph of a term's docstring, its arguments filled in."""
    given = {
        name: arguments.get(name, p.default) for name, p in signature(function).parameters.items()
    }
    if given.get("gate", "ratio") == "ratio" and "level" in given:
        given["level"] = OF_RATIOS.get(given["level"], given["level"])
    said = {name: WORDS.get(name, {}).get(str(x), x) for name, x in given.items()}
    text = " ".join((function.__doc__ or function.__name__).split("\n\n")[0].split())
    return text.format(**said).rstrip(".")


def page(parts: Parts, written: list[tuple[str, object, dict]], rejects: bool) -> str:
    """The docstring of a composition: formula, source, and a line for every part.

    `written` are the terms as (key, function, arguments); `rejects` says whether one rejects tokens.
    """
    base, names = parts.base, ", ".join(term.name for term in (*parts.corrections, *parts.extras))
    factor = "sg[W] " if parts.corrections else ""
    extra = " + extras" if parts.extras else ""
    if any(term.name == "centering" for term in parts.extras):
        extra += " (with -A sum_v sg[c_v] log pi_v)"
    if parts.support:
        extra += " (log pi and log pi_v renormalised on mu's support)"
    formula = base.formula.removeprefix("S = ")
    lines = [f"{parts.name}: S = {factor}S'{extra}, S' = {formula}.", ""]
    lines += [
        f"Source: {base.name} composed with {names or 'another ratio'}; see the pages of the parts.",
        "",
    ]
    if parts.swap:
        ((old, new),) = parts.swap.items()
        lines += [f"{old} is {new} in S': " + (
            "the ratio pi/mu of the formula is u = pi/prox." if old == "logp_mu"
            else "prox is mu, and k = prox/mu is 1."
        )]  # fmt: skip
    denominators = {term.name: term.denominator for term in parts.corrections}
    for key, function, arguments in written:
        lines += [f"{key}: {in_words(function, arguments)}."]
        if (stay := denominators.get(key, "keep")) != "keep":
            lines += [f"    Its rejected tokens {STAY[stay]}."]
    if len(parts.corrections) > 1:
        lines += ["W is the product of these."]
    if rejects:
        lines += [
            f"Rejected tokens have W = 0, no gradient, and {STAY['keep']} unless said otherwise."
        ]
    if parts.contract is not None:
        lines += [
            "contract: on tokens with |d| above its quantile over the whole batch, SAT's factor multiplies "
            "each radius and divides the coefficient of kl."
        ]
    if parts.support:
        lines += ["support: pi is first renormalised on the tokens that mu can draw (its head)."]
    if parts.norm is not None:
        lines += ["norm: W is divided by its mean over the whole batch."]
    return "\n".join(lines)
