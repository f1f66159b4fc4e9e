"""Readback: values computed on a device, read on the host without holding the device up."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepValues:
    """What one step gave. ``milliseconds``: from the end of the step before to the end of this one."""

    step: int
    loss: float
    grad_norm: float
    stop: bool
    milliseconds: float


class Readback:
    """On a GPU the values of a step are read while the next one runs, and its own clock measures the step; on a CPU
    both happen at once.

    restart(): the time until now was not a step's (evaluation, saving).
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self.restart()

    def push(self, step: int, values: torch.Tensor) -> None:
        """values: device tensor [3] of loss, gradient norm, stop."""
        if not self._cuda:
            self._pending.append((step, values, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        self._pending.append((step, host, _event()))

    def ready(self, *, all: bool = False) -> list[StepValues]:
        """The steps to look at now: on a GPU those before the newest, with ``all`` that one too."""
        keep = 1 if self._cuda and not all else 0
        done = []
        while len(self._pending) > keep:
            step, values, event = self._pending.popleft()
            if event is None or self._event is None:
                now = time.perf_counter()
                milliseconds, self._mark = (now - self._mark) * 1e3, now
            else:
                event.synchronize()
                milliseconds, self._event = self._event.elapsed_time(event), event
            loss, norm, stop = values.tolist()
            done.append(StepValues(step, loss, norm, stop > 0, milliseconds))
        return done

    def restart(self) -> None:
        self._mark = time.perf_counter()
        self._event = _event() if self._cuda else None


def _event() -> torch.cuda.Event:
    """The device's clock, once it has done what is queued."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
