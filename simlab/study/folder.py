"""A run folder: nothing but a run's files, one command at a time, and settings that do not change."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout

from simlab.study.settings import RunError

LOCK = ".lock"  # held by the kernel for as long as the process lives; the file itself stays


@contextmanager
def claimed(folder: Path, own: tuple[str, ...], option: str = "--out") -> Iterator[None]:
    """Hold a folder, made if it is missing, against other commands; left as it was if nothing is written.

    `own` are patterns of the names of a run, the first of the file that marks one: a folder without it
    must hold nothing else. Raises RunError for other files, for a folder in which another command
    works, and for one that cannot be written.
    """
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        marked = any(fnmatch(name, own[0]) for name in names)
        for name in names:
            if not (marked or any(fnmatch(name, x) for x in (*own, LOCK, "*.part"))):
                raise RunError(
                    f"{folder}: holds {name}, which no run wrote; choose another {option}"
                )
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise RunError(
            f"{folder}: another command is running in it; wait for it, or choose another {option}"
        ) from error
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror or error})") from error
    try:
        yield
        for name in ("*", *(f"{name}/*" for name in own)):
            for part in folder.glob(f"{name}.part"):
                part.unlink(missing_ok=True)  # of a process that was killed
    finally:
        with suppress(OSError):
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                for path in missing:
                    path.rmdir()
        lock.release()


def read_toml(path: Path) -> dict:
    """The settings of a TOML file. Raises ValueError in one sentence."""
    try:
        if path.is_char_device():
            raise OSError("it is a device")  # /dev/zero has no end
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path}: cannot be read as TOML (nested too deeply)") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as TOML ({error})") from error


def flat(table: dict, prefix: str = "") -> dict[str, object]:
    """Settings by dotted name."""
    out = {}
    for name, value in table.items():
        out |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return out


def check_same(path: Path, wanted: dict, may_change: tuple[str, ...] = ()) -> None:
    """Raises RunError if a run's settings in `path`, if it is there, differ from those that are wanted."""
    if not path.exists():
        return
    try:
        held, wanted = flat(read_toml(path)), flat(wanted)
    except ValueError as error:
        raise RunError(f"{error}, so this is no run's folder; choose another --out") from error
    for name in sorted(held.keys() | wanted.keys()):
        one, two = (x.get(name) for x in (held, wanted))
        if one != two and name not in may_change:
            there, here = ("not set" if x is None else repr(x) for x in (one, two))
            raise RunError(
                f"{path}: {name} is {there} in the run of this folder and {here} in this command; "
                "choose another --out"
            )
