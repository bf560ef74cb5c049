"""What every report shares: whole files, figures in two formats, one self-contained page."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

import jinja2
import polars as pl
from matplotlib.figure import Figure


def write(path: Path, save: Callable[[Path], None]) -> None:
    """Save under a temporary name, then rename: a file is whole or absent. Raises OSError."""
    part = path.with_name(path.name + ".part")
    try:
        save(part)
        os.replace(part, path)
    except pl.exceptions.PolarsError as error:  # how polars says that a disk is full
        raise OSError(str(error)) from error
    finally:
        part.unlink(missing_ok=True)


def embed(fig: Figure, folder: Path, name: str, title: str, guide: str) -> dict[str, str]:
    """Save a figure as PNG and SVG, undated; return what the page shows of it."""
    files = {suffix: BytesIO() for suffix in ("png", "svg")}
    for suffix, file in files.items():
        undated = {"Software": None} if suffix == "png" else {"Date": None}
        fig.savefig(file, format=suffix, dpi=130, metadata=undated)
        write(folder / f"{name}.{suffix}", partial(Path.write_bytes, data=file.getvalue()))
    picture = base64.b64encode(files["png"].getvalue()).decode()
    return {"name": name, "title": title, "guide": guide, "png": picture}


def write_page(path: Path, template: str, **values) -> None:
    """Render a template of this folder to a self-contained page."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    html = environment.get_template(template).render(**values)
    write(path, lambda part: part.write_text(html, encoding="utf-8"))
