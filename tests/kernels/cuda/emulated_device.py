"""A device without a GPU: numpy memory, kernels in the host emulator; for CudaOps and CudaRunner."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from crucible.kernels.launch import convert, shared_bytes
from crucible.kernels.table import kernel
from tests.emulator import Emulated

Work = Callable[[], None]
emulated = lru_cache(maxsize=None)(Emulated)


class CaptureError(Exception):
    """Something was done in a capture that a graph cannot hold."""


class EmulatedDevice:
    """``processors`` as small as it takes to have several blocks; ``order``: of threads and blocks.

    lazy: what is queued runs only when it is waited for, the latest that a GPU could. A captured graph holds its
    launches, which may touch only memory that was there before. ``launches``: names; ``graphs``: how often one was
    replayed; refuse: captures fail.
    """

    def __init__(
        self, processors: int = 8, order: str = "forward", *, lazy: bool = False, refuse: bool = False
    ) -> None:
        self.name, self.processors, self.order, self.lazy, self.refuse = "emulated", processors, order, lazy, refuse
        self.launches: list[str] = []
        self.captures = self.replays = 0
        self._queued: list[tuple[int, Work]] = []
        self._number = 0
        self._capturing: list[Work] | None = None
        self._memory: list[tuple[int, int]] = []

    # ---- memory

    def zeros(self, shape: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self._not_capturing("an allocation")
        return self._known(np.zeros(shape, dtype))

    def upload(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._not_capturing("an upload")
        return self._known(np.array(values, order="C"))

    def pinned(self, shape: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self._not_capturing("an allocation")
        return np.zeros(shape, dtype)

    # ---- what is queued

    def copy(self, source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        self._queue(lambda: np.copyto(target, source, casting="same_kind"), source, target)

    def launch(self, name: str, grid: Any, *arguments: Any) -> None:
        row = kernel(name)
        shared = shared_bytes(row, grid, arguments)
        arrays = [_as_device(value) if isinstance(value, np.ndarray) else value for value in arguments]
        convert(row, grid, row.threads, shared, arrays)

        def run() -> None:
            self.launches.append(name)
            emulated(row.source).launch(name, tuple(grid), row.threads, shared, *arguments, order=self.order)

        self._queue(run, *(value for value in arguments if isinstance(value, np.ndarray)))

    def to_device(self, host: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        self._not_capturing("a copy from the host")
        self._queue(lambda: np.copyto(target, host))

    def to_host(self, source: npt.NDArray[Any], host: npt.NDArray[Any]) -> None:
        self._not_capturing("a copy to the host")
        self._queue(lambda: np.copyto(host, source))

    def replay(self, graph: list[Work]) -> None:
        self._not_capturing("a replay")
        self.replays += 1
        for work in graph:
            self._queue(work)

    def capture(self, work: Work) -> list[Work] | None:
        self.captures += 1
        if self.refuse:
            return None
        self._capturing = graph = []
        try:
            work()
        finally:
            self._capturing = None
        return graph

    # ---- waiting

    def mark(self) -> int:
        return self._number

    def wait(self, event: int) -> None:
        while self._queued and self._queued[0][0] <= event:
            self._queued.pop(0)[1]()

    def synchronize(self) -> None:
        self.wait(self._number)

    def download(self, source: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._not_capturing("a download")
        self.synchronize()
        return source.copy()

    # ----

    def _queue(self, work: Work, *arrays: npt.NDArray[Any]) -> None:
        if self._capturing is not None:
            for array in arrays:
                start = array.ctypes.data
                if array.nbytes and not any(a <= start and start + array.nbytes <= b for a, b in self._memory):
                    raise CaptureError(f"a graph would hold the address of a passing array {array.dtype} {array.shape}")
            self._capturing.append(work)
            return
        self._number += 1
        self._queued.append((self._number, work))
        if not self.lazy:
            self.synchronize()

    def _known(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._memory.append((array.ctypes.data, array.ctypes.data + array.nbytes))
        return array

    def _not_capturing(self, what: str) -> None:
        if self._capturing is not None:
            raise CaptureError(f"{what} in a capture")


def _as_device(value: npt.NDArray[Any]) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=value.ctypes.data), dtype=value.dtype, size=value.size)
