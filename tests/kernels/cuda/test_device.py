"""CudaDevice: what a captured graph keeps alive. Without a GPU behind objects that count as CuPy's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crucible.kernels.device import CudaDevice


class Memory:
    """Stands for the memory behind an array."""


class Stream:
    """Records the graphs that it is asked to launch; ``broken``: nothing can be captured on it."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.launched = broken, []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def begin_capture(self) -> None:
        if self.broken:
            raise RuntimeError("not on this stream")

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=self.launched.append)


def device(stream: Stream) -> CudaDevice:
    made = CudaDevice.__new__(CudaDevice)
    made.stream, made._captured, made._stream_handle = stream, None, 7
    made.module = SimpleNamespace(queue=lambda *_: None)  # type: ignore[assignment]
    made.cupy = SimpleNamespace(copyto=lambda *_, **__: None)
    return made


def array(memory: Memory) -> Any:
    return SimpleNamespace(data=SimpleNamespace(mem=memory))


@pytest.mark.parametrize("use", [
    lambda own, value: own.launch("kernel", (1,), 3, value, None, 1.5),
    lambda own, value: own.copy(value, array(Memory())),
    lambda own, value: own.copy(array(Memory()), value),
])  # fmt: skip
def test_a_graph_keeps_what_it_was_given(use: Callable[[CudaDevice, Any], None]) -> None:
    own = device(stream := Stream())

    def capture() -> tuple[Any, weakref.ref[Memory]]:
        memory = Memory()
        return own.capture(lambda: use(own, array(memory))), weakref.ref(memory)

    captured, seen = capture()
    gc.collect()
    assert seen() is not None
    own.replay(captured)
    assert stream.launched == [stream]
    del captured
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("broken", [False, True])
def test_what_is_launched_outside_a_capture_is_not_kept(broken: bool) -> None:
    own, memory = device(Stream(broken)), Memory()
    assert (own.capture(lambda: None) is None) is broken
    seen = weakref.ref(memory)
    own.launch("kernel", (1,), array(memory))
    own.copy(array(memory), array(memory))
    del memory
    gc.collect()
    assert seen() is None


@pytest.mark.gpu
def test_memory_of_a_graph_is_not_given_to_others() -> None:
    own = CudaDevice()
    target = own.zeros(1 << 16, np.float32)

    def capture() -> Any:
        source = own.upload(np.full(1 << 16, 3, np.float32))
        own.copy(source, target)
        return own.capture(lambda: own.copy(source, target))

    captured = capture()
    assert captured is not None
    others = [own.upload(np.full(1 << 16, 5, np.float32)) for _ in range(4)]
    own.replay(captured)
    assert (own.download(target) == 3).all()
    assert len(others) == 4
