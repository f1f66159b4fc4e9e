"""TimedOps: the profiler. Ops wrapped so that THE forward pass notes how long each of them takes.

On a GPU marks are CUDA events before and after each op, in its stream; nothing waits until all is queued. Events keep
a kernel from starting before its predecessor has ended, which a graph of dependent launches allows: OmittingOps tells
what an op costs there, by leaving it out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from crucible.model.ops import Ops
from crucible.model.weights import Weights

SET_UP = {"pack", "pack_qkv", "pack_gated", "vector", "allocate_cache"}
VIEWS = {"take_rows"}
"""What does no work worth timing: on a GPU it launches nothing."""
OPS = {name for name in vars(Ops) if not name.startswith("_")} - SET_UP - VIEWS


class Clock(Protocol):
    """``mark`` notes a moment of the device's work; ``microseconds`` between two are known after ``wait``."""

    def mark(self) -> Any: ...
    def wait(self) -> None: ...
    def microseconds(self, first: Any, last: Any) -> float: ...


class HostClock:
    """For work that is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def microseconds(self, first: float, last: float) -> float:
        return 1e6 * (last - first)


class EventClock:
    """CUDA events in the stream of a CudaDevice."""

    def __init__(self, device: Any) -> None:
        self._cuda, self._device = device.cupy.cuda, device

    def mark(self) -> Any:
        event = self._cuda.Event()
        event.record(self._device.stream)
        return event

    def wait(self) -> None:
        self._device.synchronize()

    def microseconds(self, first: Any, last: Any) -> float:
        return 1000.0 * float(self._cuda.get_elapsed_time(first, last))  # milliseconds


def clock_of(device: Any) -> Clock:
    """The clock of a device: None is the CPU; a device without CuPy (the emulator) is done when a launch returns."""
    return HostClock() if getattr(device, "cupy", None) is None else EventClock(device)


class TimedOps:
    """``ops`` with a note of each op of the forward pass. labels: names by the id of an op's weights (op_labels)."""

    def __init__(self, ops: Any, clock: Clock, labels: Mapping[int, str]) -> None:
        self._ops, self._clock, self._labels = ops, clock, labels
        self._marks: list[tuple[str, int, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if name not in OPS:
            return op

        def timed(*arguments: Any, **named: Any) -> Any:
            before = self._clock.mark()
            result = op(*arguments, **named)
            after = self._clock.mark()
            self._marks.append((label_of(name, arguments, self._labels), bytes_of(arguments), before, after))
            return result

        return timed

    def take(self) -> list[tuple[str, int, float]]:
        """(label, bytes of weights, microseconds) of each op since the last call, in order. Waits for them."""
        self._clock.wait()
        marks, self._marks = self._marks, []
        return [(label, size, self._clock.microseconds(first, last)) for label, size, first, last in marks]


class OmittingOps:
    """``ops`` of a GPU in which the ops ``omitted`` (labels) launch nothing: their results are what lay there before.

    The numbers are wrong and the work of all other kernels is the same, so the difference in time is what the omitted
    ones cost among the others.
    """

    def __init__(self, ops: Any, omitted: set[str], labels: Mapping[int, str]) -> None:
        self._ops, self._omitted, self._labels = ops, omitted, labels

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if name not in OPS:
            return op

        def perhaps(*arguments: Any, **named: Any) -> Any:
            if label_of(name, arguments, self._labels) not in self._omitted:
                return op(*arguments, **named)
            device = self._ops.device
            self._ops.device = Mute(device)
            try:
                return op(*arguments, **named)
            finally:
                self._ops.device = device

        return perhaps


class Mute:
    """A device that launches and copies nothing."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, *arguments: Any) -> None:
        pass

    def copy(self, *arguments: Any) -> None:
        pass


def op_labels(weights: Weights) -> dict[int, str]:
    """What tells ops of one name apart: the id of a norm's or projection's weights → its place in the model."""
    labels = {id(weights.final_norm): "final norm"}
    for layer in weights.layers:
        labels |= {
            id(layer.attention_norm): "attention norm",
            id(layer.mlp_norm): "mlp norm",
            id(layer.attention_output): "attention output",
            id(layer.mlp_out): "mlp output",
        }
    return labels


def label_of(op: str, arguments: tuple[Any, ...], labels: Mapping[int, str]) -> str:
    return labels.get(id(arguments[1]), op) if len(arguments) > 1 else op


def bytes_of(arguments: tuple[Any, ...]) -> int:
    """Bytes of the packed weights that an op reads whole: those of a projection."""
    matrix: Any = arguments[1] if len(arguments) > 1 else None
    return int(matrix.nbytes) if hasattr(matrix, "out_features") else 0
