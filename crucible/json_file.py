"""Reading JSON that somebody else wrote: every fault becomes one line naming the file."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from crucible.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
"""Larger than any known index or tokenizer; a bigger "config" is not one."""


def parse_json(data: bytes | memoryview, where: str | Path) -> dict[str, Any]:
    """The JSON object in ``data``.

    Stricter than :mod:`json`: duplicate keys, NaN and Infinity, overflowing numbers, lone surrogates, and anything but
    an object at the top are refused. Raises CheckpointError that starts with ``where``.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            twice = Counter(name for name, _ in items).most_common(1)[0][0]
            raise CheckpointError(f"{where}: duplicate key {shown(twice)}")
        return result

    def constant(text: str) -> NoReturn:
        raise CheckpointError(f"{where}: {text} is not a JSON number")

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise CheckpointError(f"{where}: the number {shown(text)} is out of range")
        return value

    try:
        text = str(data, "utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}, so not valid JSON") from None
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: a JSON object was expected, got {shown(value)}")
    if re.search(r"\\u[dD][89a-fA-F]", text) and (bad := _lone_surrogate(value)) is not None:
        raise CheckpointError(f"{where}: the string {shown(bad)} holds half of a surrogate pair, so it is not text")
    return value


def _lone_surrogate(value: Any) -> str | None:
    """A key or string inside ``value`` that has no UTF-8 form: JSON's escapes can write one."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += (*item.keys(), *item.values())
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                return item
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at ``path``. Raises CheckpointError (also when it cannot be read)."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: too large to be a JSON description ({path.stat().st_size} bytes)")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    return parse_json(data, path)


def shown(value: object, limit: int = 80) -> str:
    """``value`` as a short one-line literal for an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def one_line(text: str) -> str:
    """``text`` with line breaks and other control characters written as escapes."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
