"""The ``crucible`` command: one parser; exit codes are crucible.command_errors'.

Each subcommand is a module of crucible.commands with ``add_parser`` and ``run``; what is heavy is imported in ``run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from crucible import __version__
from crucible.command_errors import ERROR, run_command
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
from crucible.errors import ConfigError

COMMANDS = (
    generate, inspect, pull, importing, quantize, tokenize, detokenize, logits, evaluate, bench, profile, check_suite,
    validate, doctor,
)  # fmt: skip

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
    """Runs one command line and returns its exit code."""

    def command() -> int | None:
        args = build_parser().parse_args(arguments)
        if sys.stdout is None:
            raise ConfigError("standard output is closed")
        code: int | None = args.run(args)
        return code

    return run_command("crucible", command)


if __name__ == "__main__":
    sys.exit(main())
