"""Options and argument types that several subcommands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from crucible.choices import DEVICES, QUANTS
from crucible.errors import ConfigError, RequestError, TokenizerError

if TYPE_CHECKING:
    from crucible.config import EngineConfig

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

MODEL_HELP = "model directory or name of a pulled model (default: %s)"
DEFAULT_MODEL = "the default model, pulled on first use"


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def whole(text: str) -> int:
    """A whole number of at least 0."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return number


def number(text: str) -> float:
    """A number; its range is SamplingParams' to judge."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def token_list(text: str) -> list[int]:
    """Token ids separated by commas."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be token ids separated by commas, got {text!r}") from None
    if min(ids) < 0:
        raise argparse.ArgumentTypeError(f"token ids are not negative, got {min(ids)}")
    return ids


def add_model(parser: argparse.ArgumentParser, *, default: str = DEFAULT_MODEL) -> None:
    """The optional positional MODEL."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP % default)


def add_quant(parser: argparse.ArgumentParser, *, default: str) -> None:
    """``--quant``; ``default`` is for the help, ``engine_config`` decides."""
    parser.add_argument("--quant", choices=QUANTS, help=f"weight type (default: $CRUCIBLE_QUANT, else {default})")


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device`` and ``--threads``."""
    parser.add_argument("--device", choices=DEVICES, help="where to compute (default: $CRUCIBLE_DEVICE, else auto)")
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="CPU threads (default: $CRUCIBLE_THREADS, else every core this process may use)",
    )


def engine_config(args: argparse.Namespace, *, default_quant: str, **flags: Any) -> EngineConfig:
    """The flags, else CRUCIBLE_* variables, else ``default_quant`` and EngineConfig's defaults.

    The flags are ``args``' quant, device and threads; ``flags`` add to them or replace them. Raises ConfigError for a
    bad value.
    """
    from crucible.config import EngineConfig

    given = {"quant": args.quant, "device": args.device, "threads": args.threads, **flags}
    return EngineConfig.from_environment(defaults={"quant": default_quant}, **given)


KERNEL_SWITCHES = ("gemm", "decode_gemm", "attn", "prefill_attn")


def gpu_settings(config: EngineConfig) -> dict[str, Any]:
    """What of ``config`` chooses a GPU's kernels, as arguments of Direct.load and Session."""
    return {"overlap": config.overlap, "switches": {name: getattr(config, name) for name in KERNEL_SWITCHES}}


def refuse_switches(device: str, **switches: object) -> None:
    """Refuses options that only a GPU has. Raises ConfigError naming the first that was given.

    switches: by the option's name without dashes, its value; None and False are not given.
    """
    for name, value in switches.items():
        if device != "cuda" and value not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} needs --device cuda; this runs on {device}")


def check_token_ids(ids: Sequence[int], token_count: int) -> None:
    """Refuses ids that mean nothing to the model. Raises RequestError naming the first one."""
    for token in ids:
        if not 0 <= token < token_count:
            raise RequestError(f"token id {token} lies outside the model's ids 0 … {token_count - 1}", "tokens")


def standard_input() -> BinaryIO:
    """The bytes of standard input. Raises ConfigError where it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed; give the input as an argument or open it")
    return sys.stdin.buffer


def read_text(argument: str | None, what: str) -> str:
    """``argument``, or UTF-8 from standard input. Raises TokenizerError naming the byte that is not UTF-8."""
    if argument is None:
        return decode_utf8(standard_input().read(), what)
    return decode_utf8(argument.encode("utf-8", "surrogateescape"), what)  # the bytes that the shell passed


def read_file(path: str) -> bytes:
    """A file's bytes; ``-`` is standard input."""
    return standard_input().read() if path == "-" else Path(path).read_bytes()


def decode_utf8(data: bytes, what: str) -> str:
    """Text from UTF-8 bytes, refused with the offending byte and its offset. Raises TokenizerError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None


def progress(message: str) -> None:
    """A line for a human who waits."""
    if sys.stderr is not None:  # None: closed; print would then take standard output
        print(message, file=sys.stderr, flush=True)


def stderr_is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


RUNTIME = "crucible.kernels.cpu.runtime"
ONCE = "(once; "
"""In a message about the compiling of a GPU's kernels (crucible/kernels/source.py), which takes long."""
COMPILING = "compiling kernels for this machine; this happens once"


def announce_compilation(say: Callable[[str], None] = progress) -> AbstractContextManager[object]:
    """From now on says why it takes long, once, if kernels have to be compiled; the context's end stops that."""
    from crucible.kernels.cpu.runtime import CompilationListener

    return closing(CompilationListener(lambda: say(COMPILING)))


class Status:
    """One line on a terminal that says what is being waited for, and goes away; elsewhere only what takes long.

    It begins with the first message, which a model's loading sends before any kernel is compiled. On a GPU kernels
    announce their own compiling, and Numba stays out.
    """

    def __init__(self) -> None:
        self._shown = False
        self._listening: AbstractContextManager[object] | None = None

    def __call__(self, message: str) -> None:
        if self._listening is None and RUNTIME in sys.modules:
            self._listening = announce_compilation(self._show if stderr_is_terminal() else progress)
        if stderr_is_terminal():
            self._show(message)
        elif ONCE in message:
            progress(message)

    def _show(self, message: str) -> None:
        sys.stderr.write(f"\r\x1b[K{message} …")
        sys.stderr.flush()
        self._shown = True

    def clear(self) -> None:
        """Removes the line, before other output."""
        if self._listening is not None:
            self._listening.__exit__(None, None, None)
            self._listening = None
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
