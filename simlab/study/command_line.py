"""From a shell to a function: help at once, and every problem as one sentence on stderr.

The code of a command is loaded when it is called: it may need packages that a base install lacks.
Imports the standard library only, until `parse` is called.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from typing import NoReturn, TextIO, TypeVar

from simlab.core.arguments import check_name

LONGEST = 1000  # characters of a refusal
T = TypeVar("T")


class UserError(Exception):
    """A problem whose message is one sentence for the user."""


def run(
    program: str,
    commands: tuple[str, ...],
    load: Callable[[str], Callable[[list[str]], None]],
    extra: str,
    arguments: list[str] | None,
    leave: Callable[[int], NoReturn] = sys.exit,
) -> None:
    """Run one command; exit code 2 after a problem, 130 when stopped.

    `load` gives the function of a command, which takes the words behind its name; `extra` is the
    optional dependency that brings what the commands need; `leave` ends the process when stopped. A word
    `--debug` shows the traceback of an error too.
    """
    words = sys.argv[1:] if arguments is None else arguments
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
    except KeyboardInterrupt:
        print(f"\n{program}: stopped; the same command resumes", file=sys.stderr)
        leave(130)


def _dispatch(
    program: str,
    commands: tuple[str, ...],
    load: Callable[[str], Callable[[list[str]], None]],
    words: Sequence[str],
) -> None:
    """Help, or the command that the first word names."""
    if words[:1] in ([], ["-h"], ["--help"]):
        print(f"usage: {program} {{{','.join(commands)}}} [options]\n")
        print(f"{program} COMMAND --help explains one.")
        raise SystemExit(0 if words else 2)
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
