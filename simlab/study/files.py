"""Files that are whole or absent, the commit of the code that runs, and the sources behind a module."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import cache_from_source
from pathlib import Path

import polars as pl

ROOT = Path(__file__).parents[2]  # of the packages
PACKAGES = ("scaleup", "simlab", "theory")
IMPORTED: dict[Path, dict[Path, str]] = {}  # of each user's file: what it imported, with digests


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Save under a temporary name of this process, then rename: a file is whole or absent.

    Raises OSError.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save(part)
        os.replace(part, path)
    except pl.exceptions.PolarsError as error:  # at times a full disk is a "transport error"
        with part.open("ab") as file:
            file.write(bytes(2**16))  # raises what the disk itself says
        raise OSError(str(error)) from error
    finally:
        part.unlink(missing_ok=True)


def commit() -> str:
    """The commit of the code that runs, with "-dirty" if files differ; "unknown" outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        subprocess.check_output(
            [*git, "ls-files", "--error-unmatch", str(Path(__file__))], stderr=subprocess.DEVNULL
        )
        head = subprocess.check_output(
            [*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL
        )
        dirty = subprocess.check_output(
            [*git, "status", "--porcelain", "simlab", "scaleup"],
            text=True,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("-dirty" if dirty.strip() else "")


def sources(start: str | Path, roots: Sequence[Path] = (ROOT,)) -> list[Path]:
    """The files in `roots` that a module, or a file, imports, at any depth and anywhere in their code."""
    files: dict[Path, None] = {}
    waiting: list[tuple[str, Sequence[Path]]] = []

    def read(path: Path) -> None:
        files[path] = None
        for name in imports(path):
            level = len(name) - len(name.lstrip("."))
            waiting.append((name[level:], path.parents[level - 1 : level] if level else roots))

    if isinstance(start, Path):
        read(start)
    else:
        waiting.append((start, roots))
    while waiting:
        name, places = waiting.pop()
        for place in (root / name.replace(".", "/") for root in places):
            for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                if path not in files and path.is_file():
                    read(path)
        waiting += [(parent, places)] if (parent := name.rpartition(".")[0]) else []
    return sorted(files)


def local_sources(file: Path) -> list[Path]:
    """A user's file and what it imports, at any depth, that is neither installed nor of this project."""
    file, library = file.resolve(), Path(sysconfig.get_path("stdlib")).resolve()
    own = [path for path in map(Path.resolve, map(Path, sys.path)) if library not in path.parents]
    own = [path for path in own if not {"site-packages", "dist-packages"} & {*path.parts}]
    found = sources(file, [file.parent, *(path for path in own if path != library)])
    project = {ROOT.resolve() / name for name in PACKAGES}
    return [path for path in found if path == file or not project & {*path.parents}]


def code_of(file: str | Path | None) -> str | None:
    """A digest of a user's file and of what it imports beside it; None for no file.

    Raises OSError if one cannot be read.
    """
    if file is None:
        return None
    return sha256(" ".join(sorted(map(_digest, local_sources(Path(file))))).encode()).hexdigest()


def forget_edited(file: Path) -> bool:
    """Whether a module that a user's file imports was edited since this process imported it.

    If so, all that it imports beside it is forgotten, so that running the file again imports it anew.
    Call it before the file runs.
    """
    if not file.is_file():
        return False
    state = {x: _digest(x) for x in local_sources(file) if x != file.resolve()}
    edited = any(
        before.get(x, digest) != digest
        for before in IMPORTED.values()
        for x, digest in state.items()
    )
    if edited:
        for name, module in [*sys.modules.items()]:
            path = getattr(module, "__file__", None)
            if path and name != "__main__" and Path(path).resolve() in state:
                del sys.modules[name]
        for path in state:  # Python tells a stale one by seconds and size only
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
        importlib.invalidate_caches()
    IMPORTED[file.resolve()] = state
    return edited


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def imports(path: Path) -> list[str]:
    """Dotted names that a file imports: a.b of `from a import b`, which is a module or stands in one.

    A relative import keeps its dots. A file that is not Python imports nothing.
    """
    return _imports(path.read_bytes())


@cache
def _imports(code: bytes) -> list[str]:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = "." * node.level + (f"{node.module}." if node.module else "")
            found += [f"{parent}{alias.name}" for alias in node.names]
    return found
