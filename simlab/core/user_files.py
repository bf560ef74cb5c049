"""A user's Python file as a module. It is code and runs, again whenever its content is another."""

from __future__ import annotations

import linecache
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

LOADED: dict[Path, tuple[bytes, ModuleType]] = {}  # by path: the content that ran, and its module


def module_of(path: Path, package: str, anew: bool = False) -> ModuleType:
    """The module of a file, named after it within `package`; the same one while the content is the same.

    `anew` runs it in any case, such as after an edit of what it imports. Raises ValueError in one
    sentence for a file that is no Python, whose name is no word, or that cannot be run.
    """
    if path.suffix != ".py":
        raise ValueError(f"{path}: is not a .py file")
    if not path.stem.isidentifier() or path.stem.startswith("_"):
        raise ValueError(f"{path}: the name of the file must be a word, it becomes a name here")
    file = path.resolve()
    spec = spec_from_file_location(f"{package}.{path.stem}", file)
    assert spec  # there is one for every .py file
    try:
        source = file.read_bytes()
        before, module = LOADED.get(file, (None, None))
        if module is not None and before == source and not anew:
            return module
        module = module_from_spec(spec)
        exec(
            compile(source, str(file), "exec"), module.__dict__
        )  # the bytes that were read, no .pyc
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise ValueError(f"{path}: cannot be loaded ({problem(error)})") from error
    LOADED[file] = source, module
    linecache.checkcache(str(file))
    sys.modules[module.__name__] = module  # where torch.compile looks for the globals of a function
    return module


def problem(error: BaseException) -> str:
    """An error of a user's code in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
