"""PowerPoller: enforced power limit and clock of a GPU, read by a thread beside the training loop."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NVML_ERRORS: tuple[type[Exception], ...] = (OSError, AttributeError, ValueError)


@dataclass(frozen=True)
class Power:
    """Enforced power limit in watts and SM clock in MHz; None where the driver does not say."""

    limit_w: float | None = None
    clock_mhz: int | None = None


def read_power(index: int) -> Power:
    """The values of CUDA device ``index`` now; empty without an NVIDIA driver."""
    return _reader(index)()


class PowerPoller:
    """Keeps the latest values of CUDA device ``index`` in ``latest``; ``index`` None (a CPU) leaves it empty.

    The loop only reads an attribute: a query takes up to milliseconds (NVML) or tens of them (nvidia-smi).
    """

    def __init__(self, index: int | None, interval: float = 0.5) -> None:
        self.latest = Power()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if index is None:
            return
        read = _reader(index)
        self.latest = read()
        if self.latest == Power():
            return

        def poll() -> None:
            while not self._stop.wait(interval):
                self.latest = read()

        self._thread = threading.Thread(target=poll, name="power-poller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


def _reader(index: int) -> Callable[[], Power]:
    """How to read device ``index``: NVML when its bindings are installed, else nvidia-smi."""
    physical = _physical(index)
    try:
        import pynvml
    except ImportError:
        return lambda: _from_smi(physical)
    try:
        pynvml.nvmlInit()
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(physical))
            if physical.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(physical)
        )
    except (*NVML_ERRORS, pynvml.NVMLError):
        return lambda: _from_smi(physical)
    return lambda: _from_nvml(pynvml, handle)


def _physical(index: int) -> str:
    """NVML's index or UUID of CUDA device ``index``: NVML does not know CUDA_VISIBLE_DEVICES."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)


def _from_nvml(pynvml: Any, handle: Any) -> Power:
    def value(query: Callable[..., int], *arguments: int) -> int | None:
        try:
            return query(handle, *arguments)
        except (*NVML_ERRORS, pynvml.NVMLError):
            return None

    milliwatts = value(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    clock = value(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
    return Power(None if milliwatts is None else milliwatts / 1000, clock)


def _from_smi(device: str) -> Power:
    command = ["nvidia-smi", f"--id={device}", "--query-gpu=enforced.power.limit,clocks.sm"]
    try:
        line = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return Power()
    return parse_smi(line)


def parse_smi(line: str) -> Power:
    """``"700.00, 1980"`` as Power; ``[N/A]`` and the like as None."""

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    limit, _, clock = line.strip().partition(",")
    megahertz = number(clock)
    return Power(number(limit), None if megahertz is None else int(megahertz))
