"""LaTeX between dollars as MathML, which browsers draw without a script."""

from __future__ import annotations

from latex2mathml.converter import convert
from markupsafe import Markup, escape


def mathml(text: str) -> Markup:
    """Text with every $formula$ as MathML. Raises ValueError in one sentence for LaTeX it cannot read."""
    parts = text.split("$")
    if len(parts) % 2 == 0:
        raise ValueError("has an odd number of dollar signs")
    try:
        return Markup("").join(
            Markup(convert(part)) if i % 2 else escape(part) for i, part in enumerate(parts)
        )
    except Exception as error:  # its parser raises many kinds
        raise ValueError(f"has a formula that is no LaTeX ({type(error).__name__})") from error
