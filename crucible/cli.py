"""The ``crucible`` command: one parser, one place that turns errors into one line and an exit code.

Exit codes: 0 done, 2 an error with one line on standard error, 130 interrupted, 141 the reader of our output is gone.
Each subcommand is a module of crucible.commands with ``add_parser`` and ``run``; what is heavy is imported in ``run``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from crucible import __version__
from crucible.commands import (
    bench,
    check_suite,
    detokenize,
    doctor,
    evaluate,
    generate,
    importing,
    inspect,
    logits,
    profile,
    pull,
    quantize,
    tokenize,
    validate,
)
from crucible.errors import CrucibleError

COMMANDS = (
    generate, inspect, pull, importing, quantize, tokenize, detokenize, logits, evaluate, bench, profile, check_suite,
    validate, doctor,
)  # fmt: skip

ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"crucible: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; ``run`` of the parsed namespace is the function to call."""
    parser = Parser(
        prog="crucible",
        description="Train, understand and serve small Llama-style language models.",
        epilog="MODEL is a directory or the name of a pulled model; without it the default model is used. "
        "crucible-serve answers over HTTP.",
    )
    parser.add_argument("--version", action="version", version=f"crucible {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. Bad input never becomes a traceback."""
    try:
        try:
            args = build_parser().parse_args(arguments)
        except SystemExit:  # --help, --version, usage errors
            flush()
            raise
        if sys.stdout is None:
            return fail("standard output is closed")
        code: int = args.run(args) or 0
        flush()  # here, so that a reader that is gone is noticed below and not at interpreter exit
        return code
    except CrucibleError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        discard_output()
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return fail(f"{where}{error.strerror or error}")
    except MemoryError as error:
        return fail(f"not enough memory{f': {error}' if str(error) else ''}")


def flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_output() -> None:
    """Writes what is buffered, or lets go of it where it cannot be written: the interpreter would complain at exit."""
    try:
        flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> int:
    """Prints ``message`` as the one line of an error."""
    discard_output()
    line = " ".join(message.split())
    if sys.stderr is not None:  # None: closed; print would then take standard output
        with suppress(OSError):
            print(f"crucible: error: {line}", file=sys.stderr, flush=True)
    return ERROR


if __name__ == "__main__":
    sys.exit(main())
