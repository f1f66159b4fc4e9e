"""Site: the launches of a kernel that were found right, so that one like them is only written down.

A check takes as long as a small kernel. What decides it are the grid, the types of the arguments, and the integers that
have limits or that the shared memory depends on; element types are compared each time.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from crucible.kernels.table import ELEMENTS, KernelRow

KNOWN_LAUNCHES = 4096  # of a kernel; then it starts afresh
CELL = 8  # bytes of an argument
LETTERS = {ctypes.c_void_p: "Q", ctypes.c_int: "i4x", ctypes.c_float: "f4x"}


class Site:
    """Of kernel ``row``, whose handle is ``function``: ``parameters`` is the address that the driver takes.

    known: dynamic shared memory of each launch found right, by ``key``.
    """

    def __init__(self, row: KernelRow, function: int) -> None:
        self.row, self.function = row, function
        self.known: dict[Any, int] = {}
        self._pointers = [
            (index, np.dtype(ELEMENTS[a.element]) if a.element in ELEMENTS else None)
            for index, a in enumerate(row.arguments)
            if a.element
        ]
        self._pack_into = struct.Struct("<" + "".join(LETTERS[a.ctype] for a in row.arguments)).pack_into
        self._block = ctypes.create_string_buffer(CELL * len(row.arguments) or 1)
        start = ctypes.addressof(self._block)
        self._cells = (ctypes.c_void_p * len(row.arguments))(*(start + CELL * i for i in range(len(row.arguments))))
        self.parameters = ctypes.addressof(self._cells)
        self._numbers, self._count = _numbers_that_matter(row), len(row.arguments)

    def key(self, grid: Sequence[int], args: Sequence[Any]) -> Any:
        """What decides whether a launch is right, but for where arrays lie and what they hold. None: nothing can."""
        key = tuple(grid), tuple(map(type, args)), self._numbers(args) if len(args) == self._count else ()
        try:
            hash(key)
        except TypeError:  # a number that is none
            return None
        return key

    def learn(self, key: Any, shared: int) -> None:
        """A launch of this key has been checked, and takes ``shared`` bytes."""
        if len(self.known) >= KNOWN_LAUNCHES:
            self.known.clear()
        self.known[key] = shared

    def write(self, args: Sequence[Any]) -> bool:
        """The values of a launch whose key is known. False if one must be looked at more closely."""
        values = list(args)
        for index, kind in self._pointers:
            value = values[index]
            if value is None:
                values[index] = 0
                continue
            pointer = values[index] = value.data.ptr
            if not pointer or (kind is not None and value.dtype is not kind):
                return False
        try:
            self._pack_into(self._block, 0, *values)
        except (struct.error, OverflowError):
            return False
        return True


def _numbers_that_matter(row: KernelRow) -> Callable[[Sequence[Any]], Any]:
    """Takes those integers out of a launch's arguments that have limits or decide how much shared memory it needs."""
    reads = set(row.limits)

    class Sizes(dict[str, int]):
        def __missing__(self, name: str) -> int:
            reads.add(name)
            return 1

    row.shared(Sizes())
    places = [index for index, argument in enumerate(row.arguments) if argument.name in reads]
    if not places:
        return lambda args: None
    return itemgetter(*places)
