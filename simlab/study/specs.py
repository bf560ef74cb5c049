"""How methods, noise models and lag regimes are written in one word, in files and on the command line.

[label=]name[@stream][:argument=value,...]      ppo   sat:alpha=0.95   mine=ppo@1:eps_low=0.1
    ...[+term[:argument=value,...]]...          gspo+tis   ppo+icepop:low=0.5,high=5   (methods only)

In TOML the same may be a table, which `written` puts into one word:

    methods = ["ppo", {label = "mine", name = "ppo", eps_high = 0.28, terms = [{name = "icepop", high = 5}]}]
"""

from __future__ import annotations

import ast
import math
import re
import warnings

from simlab.core.arguments import call, check_name
from simlab.lag import LAGS, Regime
from simlab.stabilizers import term_keys

SPEC = re.compile(
    r"(?:(?P<label>[^=:@,\s]+)=)?(?P<name>\w+)(?:@(?P<stream>\d+))?(?::(?P<arguments>\S+))?"
)

TERM = re.compile(r"\+(?=[A-Za-z_]\w*(?:[:@+]|$))")  # not the sign of 1e+5
FORM = "[label=]name[@stream][:argument=value,...]"


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
    label, name, stream, arguments = _one(spec, spec)
    if stream or label:
        raise ValueError(f"{spec!r} is not name[:argument=value,...]")
    return name, arguments


def parse(spec: str) -> tuple[str, str, int, dict]:
    """(label, name, stream, arguments) of `[label=]name[@stream][:argument=value,...][+term[:...]]...`.

    The name of a composition is `name+term+...`, and an argument of a term is `term.argument`.
    """
    first, *terms = TERM.split(spec.strip())
    label, name, stream, arguments = _one(first, spec)
    names = [re.split("[:@]", term)[0] for term in terms]
    for key, term in zip(term_keys(names), terms, strict=True):
        _, _, its_stream, own = _one(term, spec)
        if its_stream:
            raise ValueError(
                f"{spec!r}: the stream stands behind the first name, {name}@{its_stream}"
            )
        arguments |= {f"{key}.{argument}": value for argument, value in own.items()}
    name = "+".join([name, *names])
    label = label or (spec.strip() if stream or arguments else name)
    return label, name, stream, arguments


def written(entry: object) -> object:
    """The word of a table {name, label, stream, terms, arguments}, whose terms are tables {name, arguments}.

    A number becomes its text, as in `lags = [1, 8]`; anything else is left as it is. Raises ValueError in one sentence.
    """
    if type(entry) is int:
        return str(entry)
    if not isinstance(entry, dict):
        return entry
    rest = dict(entry)
    label, stream, terms = (rest.pop(key, None) for key in ("label", "stream", "terms"))
    if not isinstance(terms or [], list) or not all(isinstance(x, dict) for x in terms or []):
        raise ValueError(f"{entry!r}: terms must be a list of tables such as {{name = 'tis'}}")
    word = "+".join([_word(rest, entry, stream), *(_word(dict(x), entry) for x in terms or [])])
    return f"{label}={word}" if label is not None else word


def _word(table: dict, whole: dict, stream: object = None) -> str:
    """name[@stream][:argument=value,...] of a method or a term."""
    name = table.pop("name", None)
    if not isinstance(name, str) or re.search(r"[^\w]", name):
        raise ValueError(f"{whole!r}: a method or term needs a name, without terms in it")
    pairs = []
    for key, value in table.items():
        text = str(value)
        if not isinstance(value, str | int | float) or re.search(r"[,\s]|\+(?=[A-Za-z_])", text):
            raise ValueError(f"{whole!r}: {key} must be a number, true, false or one word")
        pairs.append(f"{key}={text}")
    at = "" if stream is None else f"@{stream}"
    return name + at + (":" + ",".join(pairs) if pairs else "")


def _one(spec: str, whole: str) -> tuple[str, str, int, dict]:
    """(label or "", name, stream, arguments) without terms; errors speak of the whole spec."""
    match = SPEC.fullmatch(spec.strip())
    if not match:
        raise ValueError(f"{whole!r} is not {FORM}")
    label = match["label"] or ""
    if label.startswith("_") or "$" in label or not label.isprintable():
        raise ValueError(f"{whole!r}: a label must not begin with _ or hold $, which figures read")
    arguments = {}
    for pair in (match["arguments"] or "").split(","):
        name, equals, value = pair.partition("=")
        if pair and not (name and equals and value):
            raise ValueError(f"{whole!r}: {pair!r} is not argument=value")
        if name in arguments:
            raise ValueError(f"{whole!r}: {name} is given twice")
        if pair:
            arguments[name] = literal(value)
    return label, match["name"], int(match["stream"] or 0), arguments


def literal(text: str) -> str | int | float | bool | None:
    """A number, a truth or nothing; anything else is the text itself."""
    words = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd spellings such as 1if
            value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, str | int | float) else text
