"""Where a kernel test runs: in the emulator, or with ``-m gpu`` the same test on the GPU at hand, through the launcher.

A test file that imports the autouse fixture ``place`` has each test run at both. ``kernels(source)`` then launches like
``Emulated``: numpy arrays go in and come back. Arguments are checked against the kernel table at both places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crucible.kernels.launch import Module, convert
from crucible.kernels.table import KERNELS, kernel
from tests.emulator import Emulated

_now = ["emulated"]


@pytest.fixture(autouse=True, params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    _now[0] = request.param
    yield request.param
    _now[0] = "emulated"


class InEmulator:
    def __init__(self, source: str) -> None:
        self._emulated = Emulated(source)

    def launch(self, name: str, grid: Any, block: int, shared: int, *values: Any, order: str = "forward") -> None:
        arrays = [_as_device(value) if isinstance(value, np.ndarray) else value for value in values]
        convert(kernel(name), _sizes(grid), block, shared, arrays)
        self._emulated.launch(name, grid, block, shared, *values, order=order)


class OnGpu:
    def __init__(self, source: str) -> None:
        import cupy

        self._cupy = cupy
        self._module = Module(
            int(cupy.cuda.Device().compute_capability), rows=[row for row in KERNELS if row.source == source]
        )

    def launch(self, name: str, grid: Any, block: int, shared: int, *values: Any, order: str = "forward") -> None:
        held = {id(value): self._cupy.asarray(value) for value in values if isinstance(value, np.ndarray)}
        stream = self._cupy.cuda.get_current_stream()
        self._module.launch(
            kernel(name), _sizes(grid), block, shared, stream, *(held.get(id(value), value) for value in values)
        )
        stream.synchronize()
        for value in values:
            if isinstance(value, np.ndarray) and value.flags.writeable:
                value[...] = held[id(value)].get()


def _sizes(grid: Any) -> Sequence[int]:
    return (grid,) if isinstance(grid, int) else tuple(grid)


def _as_device(value: np.ndarray[Any, Any]) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=value.ctypes.data), dtype=value.dtype, size=value.size)


@cache
def _made(where: str, source: str) -> InEmulator | OnGpu:
    return InEmulator(source) if where == "emulated" else OnGpu(source)


def kernels(source: str) -> InEmulator | OnGpu:
    """The kernels of a source at the place of the running test."""
    return _made(_now[0], source)
