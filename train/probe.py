"""The largest useful batch, from measured step times and memory, never from an out-of-memory error.

Some drivers (Windows, WSL2) do not fail when a GPU's memory is full: they spill to the host's over PCIe, and a batch
that "works" is a hundred times slower. What shows it is the fall of throughput and a peak above the memory there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crucible_train.errors import TrainingError

if TYPE_CHECKING:
    import torch

    from crucible.config.model import ModelConfig
    from crucible_train.compute import Precision

CLIFF = 0.9
"""A batch with less than this share of the best throughput of smaller ones is past the cliff."""
HEADROOM = 0.95
"""Share of the memory that a step may peak at: the rest is the driver's and the allocator's."""
REFINEMENTS = 3
PATIENCE = 5.0
"""A step this many times slower than the last batch foretold ends its measurement."""


@dataclass(frozen=True)
class Measurement:
    """One batch size. ``milliseconds``: the fastest step's, for what interferes only ever slows down. ``peak_bytes``:
    the most memory a step held; ``refused``: the device would not allocate it.
    """

    batch: int
    tokens: int
    milliseconds: float
    peak_bytes: int
    refused: bool = False

    @property
    def tokens_per_second(self) -> float:
        return 0.0 if self.refused else self.tokens / self.milliseconds * 1e3


@dataclass(frozen=True)
class Decision:
    """``batch``: the largest useful one, None when not even the smallest is; ``faults``: by batch, why it is not."""

    batch: int | None
    faults: dict[int, str]


Measure = Callable[[int, float | None], Measurement]
"""Measures a batch size, given the milliseconds a step should take (None: unknown)."""


def decide(measurements: Sequence[Measurement], capacity: int | None) -> Decision:
    """The largest batch before the first fault: memory beyond HEADROOM of ``capacity`` bytes, or the cliff.

    ``capacity`` None: unknown, only the cliff counts.
    """
    best, largest = 0.0, None
    faults: dict[int, str] = {}
    for point in sorted(measurements, key=lambda point: point.batch):
        fault = _fault(point, best, capacity)
        if fault:
            faults[point.batch] = fault
        elif not faults:
            largest = point.batch
            best = max(best, point.tokens_per_second)
    return Decision(largest, faults)


def _fault(point: Measurement, best: float, capacity: int | None) -> str:
    overshoot = _overshoot(point, capacity)
    if overshoot:
        return overshoot
    if point.tokens_per_second < CLIFF * best:
        return f"{point.tokens_per_second / best:.0%} of the best throughput: past the cliff"
    return ""


def _overshoot(point: Measurement, capacity: int | None) -> str:
    if point.refused:
        return "out of memory"
    if capacity is not None and point.peak_bytes > HEADROOM * capacity:
        return f"peak {point.peak_bytes / 1e9:.2f} GB of {capacity / 1e9:.2f} GB: memory overshoot"
    return ""


def search(measure: Measure, capacity: int | None, *, start: int = 1, largest: int = 1024) -> list[Measurement]:
    """Doubles the batch from ``start`` up to ``largest`` until one is at fault, then looks between the last two."""
    if not 1 <= start <= largest:
        raise TrainingError(f"the first batch must lie between 1 and the largest ({largest}), got {start}")
    points = [measure(start, None)]
    while not decide(points, capacity).faults and points[-1].batch < largest:
        _add(points, min(2 * points[-1].batch, largest), points[-1], measure, capacity)
    for _ in range(REFINEMENTS):
        decision = decide(points, capacity)
        if decision.batch is None or not decision.faults:
            break
        low, high = decision.batch, min(decision.faults)
        middle = (low + high) // 2
        if middle == low:
            break
        good = next(point for point in points if point.batch == low)
        _add(points, middle, good, measure, capacity)
    return sorted(points, key=lambda point: point.batch)


def _add(points: list[Measurement], batch: int, good: Measurement, measure: Measure, capacity: int | None) -> None:
    """Measures ``batch``, foretold from ``good``; a cliff is measured again and the faster time counts.

    Something else on the machine can slow one measurement down; only memory that is truly short does it twice.
    """
    expected = good.milliseconds * batch / good.batch
    point = measure(batch, expected)
    if not _overshoot(point, capacity) and batch in decide([*points, point], capacity).faults:
        again = measure(batch, expected)
        point = again if again.refused else min(point, again, key=lambda one: one.milliseconds)
    points.append(point)


class Probe:
    """Measures training steps of a model on random tokens: forward, backward and fused AdamW.

    Called with a batch size and the expected milliseconds it returns a Measurement over ``steps`` steps.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        bfloat16: bool = False,
        matmul: Precision = "bf16",
        compiled: bool = False,
        steps: int = 5,
    ) -> None:
        import torch

        from crucible_train import fp8
        from crucible_train.compute import Compute
        from crucible_train.transformer import Transformer

        if matmul != "bf16":
            fp8.require(device)
        self._config, self._device, self._steps = config, device, steps
        self._model = Transformer(config, Compute.for_precision(matmul)).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        self._loss = torch.compile(self._model.loss, dynamic=False) if compiled else self._model.loss
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)

    def __call__(self, batch: int, expected: float | None) -> Measurement:
        import torch

        tokens = batch * self._config.context_length
        reset_peak(self._device)
        times: list[float] = []
        try:
            self._step(batch)  # compiles, allocates
            for _ in range(self._steps):
                times.append(self._step(batch))
                if expected is not None and times[-1] > PATIENCE * expected:
                    break
        except torch.OutOfMemoryError:
            return Measurement(batch, tokens, float("inf"), peak_bytes(self._device), refused=True)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return Measurement(batch, tokens, min(times), peak_bytes(self._device))

    def _step(self, batch: int) -> float:
        """One training step; its milliseconds."""
        import torch

        shape = (batch, self._config.context_length + 1)
        ids = torch.randint(self._config.token_count, shape, device=self._device)
        synchronise(self._device)
        begin = time.perf_counter()
        with self._autocast:
            loss = self._loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        synchronise(self._device)
        return (time.perf_counter() - begin) * 1e3


def synchronise(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Starts a new count of peak_bytes()."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: peak resident size := the present one
        except OSError:
            return


def peak_bytes(device: torch.device) -> int:
    """The most memory held since reset_peak(): the allocator's on a GPU, else this process's (0 where unknown)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _proc_kibibytes("/proc/self/status", "VmHWM") or 0


def capacity_bytes(device: torch.device) -> int | None:
    """Memory that a step may take: all of the GPU's, or what this machine has free; None where unknown."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _proc_kibibytes("/proc/meminfo", "MemAvailable")


def _proc_kibibytes(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
