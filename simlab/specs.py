"""How methods, noise models and lag regimes are written in one word, in files and on the command line.

[label=]name[@stream][:argument=value,...]      ppo   sat:alpha=0.95   mine=ppo@1:eps_low=0.1
"""

from __future__ import annotations

import ast
import re

from simlab.arguments import call, check_name
from simlab.lag import LAGS, Regime

SPEC = re.compile(
    r"(?:(?P<label>[^=:@,\s]+)=)?(?P<name>\w+)(?:@(?P<stream>\d+))?(?::(?P<arguments>\S+))?"
)


def regime(spec: str) -> Regime:
    """The lag regime of a number (0 is synchronous, n is interval n) or `name[:argument=value,...]`.

    Raises ValueError in one sentence.
    """
    if spec.isdecimal():
        return LAGS["interval"](int(spec)) if int(spec) else LAGS["sync"]()
    name, arguments = named(spec)
    check_name("lag regime", name, LAGS)
    return call(f"lag {spec!r}", LAGS[name], **arguments)


def named(spec: str) -> tuple[str, dict]:
    """(name, arguments) of a noise model or a lag regime, which have neither label nor stream."""
    label, name, stream, arguments = parse(spec)
    if stream or label not in (name, spec.strip()):
        raise ValueError(f"{spec!r} is not name[:argument=value,...]")
    return name, arguments


def parse(spec: str) -> tuple[str, str, int, dict]:
    """(label, name, stream, arguments) of `[label=]name[@stream][:argument=value,...]`."""
    found = SPEC.fullmatch(spec.strip())
    if not found:
        raise ValueError(f"{spec!r} is not [label=]name[@stream][:argument=value,...]")
    if (found["label"] or "").startswith("_") or "$" in (found["label"] or ""):
        raise ValueError(f"{spec!r}: a label must not begin with _ or hold $, which figures read")
    arguments = {}
    for pair in (found["arguments"] or "").split(","):
        name, equals, value = pair.partition("=")
        if pair and not (name and equals and value):
            raise ValueError(f"{spec!r}: {pair!r} is not argument=value")
        if name in arguments:
            raise ValueError(f"{spec!r}: {name} is given twice")
        if pair:
            arguments[name] = _literal(value)
    stream = int(found["stream"] or 0)
    label = found["label"] or (spec.strip() if stream or arguments else found["name"])
    return label, found["name"], stream, arguments


def _literal(text: str):
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
