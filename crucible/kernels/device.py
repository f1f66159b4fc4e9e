"""Device: memory, one stream, and launches by kernel name. The engine's whole view of CUDA.

CudaDevice is CuPy's; tests put the host emulator behind the same methods, so that every op runs without a GPU.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from crucible.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

Shape = int | tuple[int, ...]
Grid = Sequence[int]


class Device(Protocol):
    """Arrays are CuPy's, or what slices, views and reshapes like them."""

    @property
    def processors(self) -> int:
        """Streaming multiprocessors."""

    def zeros(self, shape: Shape, dtype: npt.DTypeLike) -> Any:
        """A device array of zeros."""

    def upload(self, values: npt.NDArray[Any]) -> Any:
        """A device copy of ``values``."""

    def copy(self, source: Any, target: Any) -> None:
        """target[:] = source, both on the device and of one shape; converts between float32 and float16."""

    def launch(self, name: str, grid: Grid, *arguments: Any) -> None:
        """Queue kernel ``name`` with the arguments of its row (crucible/kernels/table.py)."""


def gpu_available() -> bool:
    """Whether CuPy is installed and sees a GPU. Costs an import of CuPy where it is installed."""
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        return bool(runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no GPU: whatever it is, there is none to use
        return False


@dataclass(frozen=True)
class Captured:
    """A graph, and the memory that its launches were given: it holds addresses, which keep nothing alive."""

    graph: Any
    memory: tuple[Any, ...]


class CudaDevice:
    """The GPU ``index``, through CuPy. Raises ConfigError when there is none that can be used, saying what to do."""

    def __init__(self, index: int = 0, *, overlap: bool = True, say: Callable[[str], None] | None = None) -> None:
        try:
            self.cupy = importlib.import_module("cupy")
        except ImportError as error:
            raise ConfigError(
                f"device cuda needs CuPy ({error}); install it: pip install 'crucible-lm[cuda13]', or [cuda12]"
            ) from None
        from crucible.kernels.launch import Module

        runtime = self.cupy.cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise ConfigError(f"device cuda: no usable GPU ({error}); use device cpu") from None
        if index >= count:
            raise ConfigError(f"device cuda: this machine has {count} GPUs, not one of index {index}")
        runtime.setDevice(index)
        properties = runtime.getDeviceProperties(index)
        self.name: str = properties["name"].decode()
        self.processors = int(properties["multiProcessorCount"])
        self.arch = int(properties["major"]) * 10 + int(properties["minor"])
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self._stream_handle = int(self.stream.ptr)
        self.module = Module(self.arch, overlap=overlap, say=say)
        self._captured: dict[int, Any] | None = None  # memory by identity, while a graph is captured

    def zeros(self, shape: Shape, dtype: npt.DTypeLike) -> Any:
        try:
            with self.stream:
                return self.cupy.zeros(shape, dtype)
        except self.cupy.cuda.memory.OutOfMemoryError:
            wanted = np.dtype(dtype).itemsize * int(np.prod(shape))
            free, total = self.memory()
            raise ConfigError(
                f"{wanted} bytes do not fit on {self.name} ({free} of {total} bytes are free); lower kv_memory, "
                "max_batch or context"
            ) from None

    def upload(self, values: npt.NDArray[Any]) -> Any:
        array = self.zeros(values.shape, values.dtype)
        with self.stream:
            array.set(np.ascontiguousarray(values))
        self.stream.synchronize()
        return array

    def copy(self, source: Any, target: Any) -> None:
        if self._captured is not None:
            self._hold((source, target))
        with self.stream:
            self.cupy.copyto(target, source, casting="same_kind")

    def launch(self, name: str, grid: Grid, *arguments: Any) -> None:
        if self._captured is not None:
            self._hold(arguments)
        self.module.queue(name, grid, self._stream_handle, arguments)

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total) of the device."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def pinned(self, shape: Shape, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A host array in page-locked memory, which copies do not wait for."""
        count, kind = int(np.prod(shape)), np.dtype(dtype)
        memory = self.cupy.cuda.alloc_pinned_memory(max(1, count) * kind.itemsize)
        return np.frombuffer(memory, kind, count).reshape(shape)

    def to_device(self, host: npt.NDArray[Any], target: Any) -> None:
        """Queue a copy of a page-locked array."""
        target.data.copy_from_host_async(host.ctypes.data, host.nbytes, self.stream)

    def to_host(self, source: Any, host: npt.NDArray[Any]) -> None:
        """Queue a copy into a page-locked array; ``source`` is contiguous."""
        source.data.copy_to_host_async(host.ctypes.data, host.nbytes, self.stream)

    def download(self, source: Any) -> npt.NDArray[Any]:
        """A host copy of an array, once all that is queued is done."""
        self.stream.synchronize()
        with self.stream:
            return np.asarray(source.get(stream=self.stream))

    def synchronize(self) -> None:
        """Wait for all that is queued. Raises EngineError when the device failed."""
        try:
            self.stream.synchronize()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise EngineError(f"the GPU failed: {error}") from None

    def replay(self, graph: Any) -> None:
        """Queue a graph of ``capture``."""
        graph.graph.launch(self.stream)

    def mark(self) -> Any:
        """An event at the end of what is queued now."""
        event = self.cupy.cuda.Event(block=False, disable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        """Wait for an event of ``mark``, not for what was queued after it. Raises as ``synchronize``."""
        try:
            event.synchronize()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise EngineError(f"the GPU failed: {error}") from None

    def capture(self, work: Callable[[], None]) -> Captured | None:
        """A graph of what ``work`` launches, which allocates nothing, or None if this cannot be captured."""
        self._captured = {}
        try:
            with self.stream:
                self.stream.begin_capture()
                try:
                    work()
                finally:
                    graph = self.stream.end_capture()
            return Captured(graph, tuple(self._captured.values()))
        except Exception as error:  # whatever CUDA or CuPy finds unfit: eagerly the same may work, or say what is wrong
            log.warning("no graph could be captured, so this size runs without: %s", error)
            return None
        finally:
            self._captured = None

    def _hold(self, values: Iterable[Any]) -> None:
        assert self._captured is not None
        for value in values:
            memory = getattr(getattr(value, "data", None), "mem", None)
            if memory is not None:
                self._captured[id(memory)] = memory
