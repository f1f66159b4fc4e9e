"""The ``crucible-train`` command: one table of commands, one place that turns errors into one line and an exit code.

Exit codes: 0 done, 2 an error with one line on standard error, 130 interrupted, 141 the reader of our output is gone,
143 terminated. Each command is a module with HELP, ``add_arguments(parser)`` and ``run(args)``, imported when it is the
one asked for; what is heavy (PyTorch) is imported in ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

from crucible import __version__
from crucible.errors import CrucibleError

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
ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and no abbreviated flags: a new flag must not change an old command line."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. Bad input never becomes a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            module, args = _parse(words)
        except SystemExit:  # --help, --version, usage errors
            _flush()
            raise
        code: int = module.run(args) or 0
        _flush()  # here, so that a reader that is gone is noticed below and not at interpreter exit
        return code
    except CrucibleError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        _discard_output()
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return fail(f"{where}{error.strerror or error}")
    except MemoryError as error:
        return fail(f"not enough memory{f': {error}' if str(error) else ''}")


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


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_output() -> None:
    """Writes what is buffered, or lets go of it where it cannot be written: the interpreter would complain at exit."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> int:
    """Prints ``message`` as the one line of an error."""
    _discard_output()
    line = " ".join(message.split())
    if sys.stderr is not None:  # None: closed; print would then take standard output
        with suppress(OSError):
            print(f"{PROGRAM}: error: {line}", file=sys.stderr, flush=True)
    return ERROR


if __name__ == "__main__":
    sys.exit(main())
