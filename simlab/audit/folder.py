"""What an audit leaves on disk: audit.json and report.html."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from simlab.audit.audit import Audit
from simlab.audit.page import write_report
from simlab.study.files import write


def as_json(result: dict) -> str:
    """The numbers of an audit as JSON text; what is not finite is null."""
    return json.dumps(_finite(result), indent=1, allow_nan=False) + "\n"


def write_folder(audit: Audit, folder: Path) -> None:
    """audit.json and report.html, each whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_report(audit, folder)
    text = as_json(audit.result)
    write(folder / "audit.json", lambda part: part.write_text(text, encoding="utf-8"))


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
