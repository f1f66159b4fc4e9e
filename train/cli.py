"""The ``crucible-train`` command: one table of commands; exit codes are crucible.command_errors', and 143 terminated.

Each command is a module with HELP, ``add_arguments(parser)`` and ``run(args)``, imported when it is the
one asked for; what is heavy (PyTorch) is imported in ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from crucible import __version__
from crucible.command_errors import ERROR, run_command

COMMANDS = {
    "prepare": "crucible_train.prepare_command",
    "train": "crucible_train.train_command",
    "sample": "crucible_train.sample_command",
    "sweep": "crucible_train.sweep_command",
    "analyze": "crucible_train.analyze_command",
    "budget": "crucible_train.budget_command",
    "probe-batch": "crucible_train.probe_command",
    "export": "crucible_train.export_command",
    "export-hf": "crucible_train.export_hf_command",
    "export-gguf": "crucible_train.export_gguf_command",
    "export-tokenizer": "crucible_train.export_tokenizer_command",
    "quickstart": "crucible_train.quickstart_command",
    "presets": "crucible_train.presets_command",
}

PROGRAM = "crucible-train"


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and no abbreviated flags: a new flag must not change an old command line."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""

    def command() -> int | None:
        module, args = _parse(list(sys.argv[1:] if arguments is None else arguments))
        code: int | None = module.run(args)
        return code

    return run_command(PROGRAM, command)


def _parse(words: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The command's module and its arguments. Without a known command: help, version or a usage error, and exit."""
    if words and words[0] in COMMANDS:
        module = importlib.import_module(COMMANDS[words[0]])
        parser = Parser(prog=f"{PROGRAM} {words[0]}", description=module.HELP)
        module.add_arguments(parser)
        return module, parser.parse_args(words[1:])
    wants_help = not words or words[0] in ("-h", "--help")
    parser = Parser(
        prog=PROGRAM,
        description="Train small Llama-style language models and find out what matters.",
        epilog=_command_list() if wants_help else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"crucible {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=list(COMMANDS), help="COMMAND --help says more")
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(ERROR)
    parser.parse_args(words[:1])
    raise AssertionError("argparse exits for anything but a command")


def _command_list() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {importlib.import_module(module).HELP}" for name, module in COMMANDS.items()]
    return "\n".join(["commands:", *lines])


if __name__ == "__main__":
    sys.exit(main())
