"""From a shell to a function: help at once, and every problem as one sentence on stderr.

The code of a command is loaded when it is called: it may need packages that a base install lacks.
Imports the standard library only, until `parse` is called.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from typing import NoReturn, TextIO, TypeVar

from simlab.core.arguments import check_name

RESUME = ("compare", "run")  # commands that a stop does not set back
LONGEST = 1000  # characters of a refusal
T = TypeVar("T")


class UserError(Exception):
    """A problem whose message is one sentence for the user."""


def run(
    program: str,
    commands: Iterable[str],
    load: Callable[[str], Callable[[list[str]], None]],
    extra: str,
    arguments: list[str] | None,
    leave: Callable[[int], NoReturn] = sys.exit,
) -> None:
    """Run one command; exit code 2 after a problem, 130 after Ctrl-C, 143 after SIGTERM.

    `commands` are the names, or names with what the help says of each. `load` gives the function of a
    command, which takes the words behind its name; `extra` is the optional dependency that brings what
    the commands need; `leave` ends the process when stopped. A word `--debug` shows the traceback of an
    error too.
    """
    words = sys.argv[1:] if arguments is None else arguments
    before = _on_sigterm(_terminated)
    try:
        try:
            _dispatch(program, commands, load, words)
        finally:
            sys.stdout.flush()  # also where a command ends by an exit code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("simlab", "scaleup", "theory"):
            raise
        stop(
            program,
            f"{words[0]} needs simlab[{extra}]: pip install 'simlab[{extra}]' "
            f"({error.name} is not installed)",
        )
    except (UserError, ValueError) as error:
        stop(program, str(error), "--debug" in words)
    except BrokenPipeError:  # `simlab methods | head`
        _drop(sys.stdout)
    except OSError as error:
        if error.filename is None:  # what is printed cannot be, as on a full disk
            _drop(sys.stdout)
        stop(
            program, f"{error.filename or 'output'}: {error.strerror or error}", "--debug" in words
        )
    except KeyboardInterrupt as error:
        said = "stopped; the same command resumes" if {*words[:1]} & {*RESUME} else "stopped"
        print(f"\n{program}: {said}", file=sys.stderr)
        leave(stop_code(error))
    finally:
        _on_sigterm(before)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def stop_code(error: KeyboardInterrupt) -> int:
    """The exit code of a command that was stopped: 128 and the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def _terminated(number, frame) -> NoReturn:
    raise Terminated


def _on_sigterm(handler):
    """Install a handler and return the one before; only the main thread can, and None is left alone."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return None


def _dispatch(
    program: str,
    commands: Iterable[str],
    load: Callable[[str], Callable[[list[str]], None]],
    words: Sequence[str],
) -> None:
    """Help, the version, or the command that the first word names."""
    if words[:1] in ([], ["-h"], ["--help"]):
        print(f"usage: {program} {{{','.join(commands)}}} [options]\n")
        if isinstance(commands, Mapping):
            width = max(map(len, commands))
            print("\n".join(f"  {name:{width}}  {said}" for name, said in commands.items()), "\n")
        print(f"{program} COMMAND --help explains one; {program} --version says which this is.")
        raise SystemExit(0 if words else 2)
    if list(words) == ["--version"]:
        from importlib.metadata import version

        print(f"{program} {version('simlab')}")
        raise SystemExit(0)
    check_name("command", words[0], commands)
    for word in words:
        if not word.isprintable():
            raise ValueError(f"{word!r} of the command line is not a printable text")
    load(words[0])(list(words[1:]))


def stop(program: str, sentence: str, debug: bool = False) -> NoReturn:
    """The sentence as one line of readable length on stderr, and exit code 2."""
    line = "".join(x if x.isprintable() else repr(x)[1:-1] for x in " ".join(sentence.split()))
    if len(line) > LONGEST:
        line = f"{line[: LONGEST - 200]} ... {line[-200:]}"
    try:
        if debug:
            traceback.print_exc()
        print(f"{program}: {line}", file=sys.stderr)
    except OSError:  # stderr on a full disk: the exit code is all that is left to say it
        _drop(sys.stderr)
    raise SystemExit(2) from None


def parse(kind: type[T], words: Sequence[str], program: str, **options) -> T:
    """tyro's answer to these words, its box of an error turned into a ValueError of one line."""
    import tyro

    said = StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, args=words, prog=program, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│╭╮╰╯─- \n") for line in said.getvalue().splitlines()[1:]]
        said = StringIO()
        raise ValueError(" ".join(line for line in lines if line)) from None
    finally:
        sys.stderr.write(said.getvalue())


def _drop(stream: TextIO) -> None:
    """Nobody reads it or no disk takes it: what is left in its buffer must not end in an error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
