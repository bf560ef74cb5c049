"""Server arguments of the SGLang that is installed, read off its source: a wrong one is refused before an
engine starts, which would take minutes to say so."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path

FIELDS = "srt/arg_groups/fields/*.py"  # one `name: A[type, ...]` an argument
FIELD = re.compile(r"^    (\w+): A\[\s*([^,\n]+)", re.MULTILINE)
OWN = {  # who sets it, where `options` may not
    "model_path": "world.model",
    "tp_size": "world.engine.tp",
    "dtype": "world.engine.dtype",
    "enable_deterministic_inference": "world.engine.deterministic",
    "random_seed": "--seed",
    "weight_version": "every push",
}
KINDS = {"bool": bool, "int": int, "float": (int, float), "str": str}


@cache
def known() -> dict[str, str]:
    """The type of every server argument by its name, as SGLang writes it; empty where it is not installed."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return {}
    files = sorted(Path(package.origin).parent.glob(FIELDS))
    return {name: kind for file in files for name, kind in FIELD.findall(file.read_text())}


def check(options: Mapping[str, object]) -> None:
    """Raises ValueError for an argument that SGLang has not, of another type, or that is set elsewhere."""
    arguments = known()
    for name, value in options.items():
        if name in OWN:
            raise ValueError(f"options.{name} is set by {OWN[name]}")
        if arguments and name not in arguments:
            near = get_close_matches(name, arguments, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"options.{name}: SGLang has no such server argument{hint}")
        kind = re.sub(r"^Optional\[(\w+)\]$", r"\1", arguments.get(name, "").strip())
        fits = isinstance(value, KINDS.get(kind, object))
        if not fits or (kind in ("int", "float") and isinstance(value, bool)):
            raise ValueError(f"options.{name} must be {kind}, got {value!r}")
