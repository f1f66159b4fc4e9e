"""What a command's end is worth: one place that turns errors into one line and an exit code.

Exit codes: 0 done, 2 an error with one line on standard error, 130 interrupted, 141 the reader of our output is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from crucible.errors import CrucibleError

ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def run_command(program: str, command: Callable[[], int | None]) -> int:
    """Calls ``command``, which parses its arguments and works, and returns its exit code (None: 0).

    Bad input never becomes a traceback. ``program`` begins the line of an error.
    """
    try:
        try:
            code = command() or 0
        except SystemExit:  # --help, --version, usage errors
            _flush()
            raise
        _flush()  # here, so that a reader that is gone is noticed below and not at interpreter exit
        return code
    except CrucibleError as error:
        return _fail(program, str(error))
    except KeyboardInterrupt:
        _discard_output()
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(program, f"{where}{error.strerror or error}")
    except MemoryError as error:
        return _fail(program, f"not enough memory{f': {error}' if str(error) else ''}")


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_output() -> None:
    """Writes what is buffered, or lets go of it where it cannot be written: the interpreter would complain at exit."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(program: str, message: str) -> int:
    """Prints ``message`` as the one line of an error."""
    _discard_output()
    line = " ".join(message.split())
    if sys.stderr is not None:  # None: closed; print would then take standard output
        with suppress(OSError):
            print(f"{program}: error: {line}", file=sys.stderr, flush=True)
    return ERROR
