"""The benchmarks' argument types, and the command line that a report repeats. Imported by the parser: nothing heavy."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

UNSAID = ("help", "json", "markdown")
"""Options that do not change what is measured."""


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers separated by commas, got {text!r}") from None
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {min(numbers)}")
    return numbers


def words(*allowed: str) -> Callable[[str], list[str]]:
    """Some of ``allowed``, separated by commas."""

    def parse(text: str) -> list[str]:
        for word in text.split(","):
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"must be some of {', '.join(allowed)}, got {word!r}")
        return text.split(",")

    return parse


def distinct(parse: Callable[[str], list[T]]) -> Callable[[str], list[T]]:
    """``parse``, and nothing twice: each value is a column or row of its own."""

    def parse_distinct(text: str) -> list[T]:
        values = parse(text)
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"names something twice: {text}")
        return values

    return parse_distinct


def positive_number(text: str) -> float:
    """A finite number above 0."""
    value = finite_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def rates(text: str) -> list[float]:
    """Numbers above 0, separated by commas."""
    return [positive_number(part) for part in text.split(",")]


def fraction(text: str) -> float:
    """A number of 0 … 1."""
    value = finite_number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie in 0 … 1, got {text}")
    return value


def finite_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


class Prompts(NamedTuple):
    """``requests`` prompts of ``tokens`` tokens at once; written ``4x256``, or ``512`` for one."""

    requests: int
    tokens: int

    def __str__(self) -> str:
        return str(self.tokens) if self.requests == 1 else f"{self.requests}x{self.tokens}"


def prompt_plans(text: str) -> list[Prompts]:
    """Prompts at once and their tokens: ``512`` or ``4x256``, separated by commas."""
    found = []
    for part in text.split(","):
        numbers = part.split("x")
        if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() and int(number) for number in numbers):
            raise argparse.ArgumentTypeError(f"must be tokens, or prompts x tokens such as 4x256, got {part!r}")
        found.append(Prompts(1 if len(numbers) == 1 else int(numbers[0]), int(numbers[-1])))
    return found


def plain(item: object) -> str:
    return f"{item:g}" if isinstance(item, int | float) else str(item)


def command_line(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The command that measures the same again, defaults written out (they may change)."""
    words, options = parser.prog.split(), []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if value is None or value is False or action.dest in UNSAID:
            continue
        text = ",".join(map(plain, value)) if isinstance(value, list) else str(value)
        if not action.option_strings:
            words.append(text)
        elif value is True:
            options.append(action.option_strings[-1])
        else:
            options += [action.option_strings[-1], text]
    return shlex.join([*words, *options])
