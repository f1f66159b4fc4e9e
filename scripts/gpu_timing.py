"""Timing that the bench scripts share: paired rounds, robust summaries, and the power envelope of a run.

A measurement without its envelope is not reproducible: power limits are switchable and clocks follow them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

SPREAD_WARNING = 0.30
QUERY = ("enforced.power.limit", "clocks.max.sm", "clocks.sm", "temperature.gpu", "power.draw")


@dataclass(frozen=True)
class Summary:
    """Median, quartiles and spread ((max − min) / median) of one value a round."""

    median: float
    low: float
    high: float
    spread: float

    @classmethod
    def of(cls, values: list[float]) -> Summary:
        middle = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [middle] * 3
        return cls(middle, low, high, (max(values) - min(values)) / middle)

    def line(self, unit: str) -> str:
        return f"{self.median:10.2f} {unit}   IQR {self.low:.2f}–{self.high:.2f}   spread {self.spread:6.1%}"


def choose_device(name: str) -> torch.device:
    """``auto`` is the GPU if there is one. Exits with one line for cuda without a GPU."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        sys.exit("error: no CUDA device is visible to PyTorch; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], iterations: int, device: torch.device) -> float:
    """Seconds a call of ``work``, over ``iterations`` calls in a row."""
    synchronise(device)
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(iterations):
            work()
        end.record()
        synchronise(device)
        return begin.elapsed_time(end) / 1e3 / iterations
    started = time.perf_counter()
    for _ in range(iterations):
        work()
    return (time.perf_counter() - started) / iterations


def rounds(
    works: Mapping[str, Callable[[], object]], trials: int, iterations: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of every work in every round: all works run in each round, starting one later each time.

    Clock drift then meets all of them alike, and ratios within a round are fair.
    """
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for trial in range(trials):
        first = trial % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(seconds(works[name], iterations, device))
    return times


def warm(work: Callable[[], object], device: torch.device, duration: float) -> None:
    """Runs ``work`` until clocks and temperature have left idle; the first workload is else measured cold."""
    stop = time.monotonic() + duration
    while time.monotonic() < stop:
        for _ in range(10):
            work()
        synchronise(device)


class Envelope:
    """A context manager that samples nvidia-smi while the block runs; ``text()`` is a line about it."""

    def __init__(self, device: torch.device, interval: float = 0.25) -> None:
        self._device = device
        self._interval = interval
        self._samples: list[list[float | None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Envelope:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _poll(self) -> None:
        while not self._stop.is_set():
            if (sample := query_gpu(self._device.index or 0)) is None:
                return
            self._samples.append(sample)
            self._stop.wait(self._interval)

    def text(self) -> str:
        if not self._samples:
            return "power limit, clocks: not reported by this device"
        columns = [[value for value in column if value is not None] for column in zip(*self._samples, strict=True)]
        limit, top, clock, heat, draw = (statistics.median(column) if column else float("nan") for column in columns)
        return (
            f"enforced power limit {limit:.0f} W, maximum SM clock {top:.0f} MHz; under load (median): "
            f"{clock:.0f} MHz, {draw:.0f} W, {heat:.0f} °C"
        )


def query_gpu(index: int) -> list[float | None] | None:
    """The values of QUERY for GPU ``index``; None without nvidia-smi."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [_number(text) for text in line.strip().split(",")]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def warn_of_spread(summaries: Mapping[str, Summary]) -> list[str]:
    """A line for each summary whose spread is above 30 %: the sign of a throttled, capped or shared device."""
    return [
        f"warning: {name} has a spread of {summary.spread:.0%}; close other programs, check the power limit, repeat"
        for name, summary in summaries.items()
        if summary.spread > SPREAD_WARNING
    ]


def describe(device: torch.device) -> str:
    """Device, capability and versions."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"{name}, sm_{major}{minor}, torch {torch.__version__}, CUDA {torch.version.cuda}"
