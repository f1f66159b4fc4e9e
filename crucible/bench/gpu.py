"""A GPU as the kernel benchmarks see it: time of queued work, memory that no cache holds, the machine's ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from crucible.bench.inprocess import Say
from crucible.model.timed_ops import clock_of

COLD_BYTES = 160 * 2**20
"""Work that reads this much in turn finds little of it in a cache: the largest L2 of these GPUs has 128 MB."""
MOST_LAUNCHES = 256
TARGET_US = 20_000.0
"""A timed round takes about this long, unless ``MOST_LAUNCHES`` are done before."""
FILLER_BYTES = 2**26
FILLERS, MOST_FILLERS = 8, 400
COPY_BYTES = 2**30
MATMUL_SIZE = 8192


def open_device(say: Say) -> Any:
    """The GPU. Raises ConfigError where there is none."""
    from crucible.kernels.device import CudaDevice

    say("compiling kernels")
    return CudaDevice(say=say)


class Timer:
    """Times queued work on a device, without what the host takes to queue it wherever it can be captured."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.clock = clock_of(device)
        self._filler = [device.zeros(FILLER_BYTES, np.uint8) for _ in range(2)]
        self._fill_us = 0.0
        for _ in range(3):  # the first is slow
            before = self.clock.mark()
            for _ in range(FILLERS):
                device.copy(*self._filler)
            after = self.clock.mark()
            self.clock.wait()
            self._fill_us = max(0.1, self.clock.microseconds(before, after) / FILLERS)

    def replayable(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` as a graph, or as it is where it cannot be captured. It has run once."""
        work()  # what is done on first use (shared memory limits, libraries) cannot be captured
        self.device.synchronize()
        graph = self.device.capture(work)
        return work if graph is None else lambda: self.device.replay(graph)

    def busy(self, microseconds: float) -> None:
        """Queues copies that keep the device busy at least so long, within limits."""
        for _ in range(min(MOST_FILLERS, int(microseconds / self._fill_us) + 1)):
            self.device.copy(*self._filler)

    def microseconds(self, queue: Callable[[], None]) -> float:
        """Device time of what ``queue`` queues: the second time, behind work that lasts while the host queues it."""
        begin = time.perf_counter()
        queue()
        host = time.perf_counter() - begin
        self.clock.wait()
        self.busy(30.0 + 2e6 * host)
        before = self.clock.mark()
        queue()
        after = self.clock.mark()
        self.clock.wait()
        return self.clock.microseconds(before, after)

    def rounds(self, launch: Callable[[int], None], most: int = MOST_LAUNCHES) -> Callable[[], float]:
        """Measures ``launch(i)``, i = 0 … in turn: each call gives microseconds a launch, over about TARGET_US."""
        single = max(0.1, self.microseconds(lambda: launch(0)))
        count = int(max(1, min(most, TARGET_US // single)))

        def work() -> None:
            for index in range(count):
                launch(index)

        queue = self.replayable(work)
        self.microseconds(queue)
        return lambda: self.microseconds(queue) / count


@dataclass(frozen=True)
class Ceilings:
    """What the GPU reaches at best, measured: a copy (bytes read and written a second) and a matrix product (half)."""

    copy: float
    matmul: float | None

    def microseconds(self, size: float, operations: float) -> float:
        """The least time for moving ``size`` bytes and ``operations`` multiplications and additions."""
        compute = 0.0 if self.matmul is None else operations / self.matmul
        return 1e6 * max(size / self.copy, compute)


def ceilings(timer: Timer) -> Ceilings:
    """Measures them, which takes about 2 GiB. ``matmul`` is None where CuPy has no cuBLAS."""
    device = timer.device
    count = COPY_BYTES // 4
    halves = [device.zeros(count, np.float32) for _ in range(2)]
    copy_us = min(timer.microseconds(lambda: device.copy(*halves)) for _ in range(5))
    halves.clear()
    best = matmul_seconds(timer)
    return Ceilings(2 * 4 * count / copy_us * 1e6, None if best is None else 2 * MATMUL_SIZE**3 / best)


def matmul_seconds(timer: Timer) -> float | None:
    """Of a product of two half matrices of MATMUL_SIZE by cuBLAS, random contents."""
    cupy = getattr(timer.device, "cupy", None)
    if cupy is None:
        return None
    try:
        with timer.device.stream:
            size = MATMUL_SIZE
            random = np.random.default_rng(0).standard_normal((size, size), np.float32).astype(np.float16)
            a, b = cupy.asarray(random), cupy.asarray(random.T.copy())
            out = cupy.empty((size, size), np.float16)
            times = [timer.microseconds(lambda: cupy.matmul(a, b, out=out)) for _ in range(6)]
        return min(times) / 1e6
    except Exception:  # no cuBLAS beside this CuPy, or none that loads: the ceiling stays unknown
        return None


def random_bytes(count: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def copies_of(size: int) -> int:
    """How many copies of ``size`` bytes, read in turn, no cache holds; at most MOST_LAUNCHES."""
    return max(1, min(MOST_LAUNCHES, -(-COLD_BYTES // max(1, size))))
