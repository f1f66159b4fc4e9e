"""RunMeter: turns what a step gave into its line of the log, and notices changes of speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from crucible.checkpoint import EMBEDDING, expected_tensors
from crucible.config.model import ModelConfig
from crucible_train.hardware import datasheet_peak, flops_per_token, matmul_peak
from crucible_train.power import Power, PowerPoller
from crucible_train.presets import POSITION_TABLE
from crucible_train.readback import StepValues
from crucible_train.schedule import Schedule
from crucible_train.step_time import Shift, StepTimeMonitor

Row = dict[str, float | int | None]


def matrix_parameters(config: ModelConfig) -> int:
    """Elements of the matrices that every token is multiplied with: a table that is only looked up is none."""
    lookups = {POSITION_TABLE} if config.tied_embeddings else {POSITION_TABLE, EMBEDDING}
    shapes = {name: shape for name, shape in expected_tensors(config).items() if name not in lookups}
    return sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)


@dataclass(frozen=True)
class Peaks:
    """FLOP/s of the devices together: measured and from the data sheet; None where unknown."""

    measured: float | None
    datasheet: float | None


def peaks(device: torch.device, world: int) -> Peaks:
    """Of ``world`` devices like this one; nothing on a CPU."""
    if device.type != "cuda":
        return Peaks(None, None)
    measured, promised = matmul_peak(device), datasheet_peak(torch.cuda.get_device_name(device))
    return Peaks(measured and measured * world, promised and promised * world)


class RunMeter:
    """Measures the process it is in; tokens and rates are those of all processes."""

    def __init__(
        self,
        config: ModelConfig,
        schedule: Schedule,
        *,
        context: int,
        global_batch: int,
        device: torch.device,
        world: int,
    ) -> None:
        self._device = device
        self._schedule = schedule
        self._tokens = global_batch * context
        width = config.num_heads * config.head_dim
        self._flops = flops_per_token(matrix_parameters(config), config.num_layers, width, context)
        self._peaks = peaks(device, world)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # what the measurement took is not the run's
        self._poller = PowerPoller(device.index if device.type == "cuda" else None)
        self._monitor = StepTimeMonitor()
        self._power_before = self._poller.latest

    def row(self, values: StepValues) -> Row:
        """The log's line of a step, but for what evaluation adds."""
        speed = self._tokens / values.milliseconds * 1e3
        power = self._poller.latest
        return {
            "step": values.step,
            "loss": values.loss,
            "lr": self._schedule.rate(values.step),
            "ms": round(values.milliseconds, 3),
            "tokens": values.step * self._tokens,
            "tokens_per_second": round(speed, 1),
            "mfu": _share(speed * self._flops, self._peaks.measured),
            "mfu_datasheet": _share(speed * self._flops, self._peaks.datasheet),
            "memory_gb": self._memory(),
            "power_limit_w": power.limit_w,
            "clock_mhz": power.clock_mhz,
            "grad_norm": values.grad_norm,
        }

    def shift(self, values: StepValues) -> str | None:
        """A sentence when the steps have lastingly become slower or faster, with what the device says of itself."""
        shift: Shift | None = self._monitor.add(values.step, values.milliseconds)
        if shift is None:
            return None
        before, self._power_before = self._power_before, self._poller.latest
        if self._power_before == Power():
            return str(shift)
        now = self._power_before
        return (
            f"{shift}; power limit {before.limit_w} → {now.limit_w} W, clock {before.clock_mhz} → {now.clock_mhz} MHz"
        )

    def _memory(self) -> float | None:
        """Peak bytes of PyTorch's allocations on the device, in 10^9."""
        if self._device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self._device) / 1e9, 3)

    def close(self) -> None:
        self._poller.close()


def _share(rate: float, peak: float | None) -> float | None:
    return round(rate / peak, 4) if peak else None
