"""What every report shares: whole files, figures in two formats, one self-contained page."""

from __future__ import annotations

import base64
import os
import subprocess
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
    except pl.exceptions.PolarsError as error:  # at times a full disk is a "transport error"
        with part.open("ab") as file:
            file.write(bytes(2**16))  # raises what the disk itself says
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


def write_page(path: Path, template: str | Path, **values) -> None:
    """Render a template of this folder, or of a path, to a self-contained page."""
    template = Path(__file__).parent / template
    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    html = environment.get_template(template.name).render(**values)
    write(path, lambda part: part.write_text(html, encoding="utf-8"))


def commit() -> str:
    """The commit of the code that runs, with "-dirty" if files differ; "unknown" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.check_output(
            [*git, "ls-files", "--error-unmatch", "page.py"], stderr=subprocess.DEVNULL
        )
        head = subprocess.check_output(
            [*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL
        )
        dirty = subprocess.check_output(
            [*git, "status", "--porcelain", ".", "../scaleup"], text=True, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("-dirty" if dirty.strip() else "")
