"""Typed access to the fields of somebody else's JSON, with errors that name file and field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from crucible.errors import CheckpointError
from crucible.json_file import shown

MAX_INTEGER = 2**63 - 1
"""JSON's integers have no end; larger ones mean nothing here and overflow floats."""


class Fields:
    """``values`` as read from ``path``; ``prefix`` names the object inside the file."""

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or abs(value) > MAX_INTEGER:
            raise self.error(name, "an integer", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name, 0)

    def number(self, name: str, default: float | None = None) -> float:
        value: Any = self.values.get(name, default)
        if type(value) not in (int, float) or not _finite(value):
            raise self.error(name, "a finite number", value)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false", value)
        return value

    def error(self, name: str, expected: str, value: object) -> CheckpointError:
        if name not in self.values:
            return CheckpointError(f"{self.path}: {self.prefix}{name} is missing")
        return CheckpointError(f"{self.path}: {self.prefix}{name} must be {expected}, got {shown(value)}")


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float's range
        return False
