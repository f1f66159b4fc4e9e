"""Options and argument types that several subcommands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

from crucible.errors import ConfigError, RequestError, TokenizerError

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


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device`` and ``--threads``."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: every core this process may use)"
    )


def check_device(device: str) -> None:
    """Refuses a device that this version cannot compute on. Raises ConfigError."""
    if device == "cuda":
        raise ConfigError("--device cuda: this version has no CUDA engine yet; use --device cpu or auto")


def check_token_ids(ids: list[int], token_count: int) -> None:
    """Refuses ids that mean nothing to the model. Raises RequestError naming the first one."""
    for token in ids:
        if not 0 <= token < token_count:
            raise RequestError(f"token id {token} lies outside the model's ids 0 … {token_count - 1}", "tokens")


def read_text(argument: str | None, what: str) -> str:
    """``argument``, or UTF-8 from standard input. Raises TokenizerError naming the byte that is not UTF-8."""
    if argument is None:
        return decode_utf8(sys.stdin.buffer.read(), what)
    return decode_utf8(argument.encode("utf-8", "surrogateescape"), what)  # the bytes that the shell passed


def read_file(path: str) -> bytes:
    """A file's bytes; ``-`` is standard input."""
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def decode_utf8(data: bytes, what: str) -> str:
    """Text from UTF-8 bytes, refused with the offending byte and its offset. Raises TokenizerError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None


def progress(message: str) -> None:
    """A line for a human who waits."""
    print(message, file=sys.stderr, flush=True)


def announce_compilation() -> None:
    """Says why the first run takes long, unless the kernels are compiled already."""
    from crucible.kernels.cpu import runtime

    if not runtime.is_warm():
        progress("compiling kernels for this machine; this happens once")


class Status:
    """One line on a terminal that says what is being waited for, and goes away; elsewhere only what takes long."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, message: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{message} …")
            sys.stderr.flush()
            self._shown = True
        elif message.startswith("compiling"):
            announce_compilation()

    def clear(self) -> None:
        """Removes the line, before other output."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
