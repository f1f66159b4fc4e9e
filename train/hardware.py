"""What the device can do: its matmul peak, measured and from the data sheet."""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crucible.config.paths import cache_directory

if TYPE_CHECKING:
    import torch

DATASHEET_TFLOPS = {
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.4,
    "H100": 989.4,
    "A100": 311.9,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.1,
    "L40": 181.1,
    "L4": 121.0,
    "RTX PRO 6000 Blackwell": 503.8,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71.0,
}
"""Dense bf16 tensor-core peak with float32 accumulation, from NVIDIA's data sheets; the first name that the device's
name contains as a word counts."""

PEAK_FILE = "matmul-peaks.json"


def datasheet_peak(device_name: str) -> float | None:
    """Dense bf16 FLOP/s that the vendor promises, or None for a device that the table lacks."""
    for name, tflops in DATASHEET_TFLOPS.items():
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
            return tflops * 1e12
    return None


def matmul_peak(device: torch.device) -> float | None:
    """Measured bf16 matmul FLOP/s of ``device``; None on a CPU, whose other work would decide the figure.

    Measured once a device, power limit and PyTorch version (about a second), then read from the cache directory.
    """
    import torch

    if device.type != "cuda":
        return None
    from crucible_train.power import read_power

    limit = read_power(device.index or 0).limit_w
    key = f"{torch.cuda.get_device_name(device)} | {limit or 'unknown'} W | torch {torch.__version__}"
    path = cache_directory() / PEAK_FILE
    known = _read(path)
    if key not in known:
        known[key] = _measure(device)
        _write(path, known)
    return float(known[key])


def _measure(device: torch.device, size: int = 8192, trials: int = 20) -> float:
    """Median FLOP/s of bf16 ``size``³ products of random numbers (zeros would draw less power and run faster)."""
    import torch

    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(5):
        left @ right
    times = []
    for _ in range(trials):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        left @ right
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize(device)
    seconds = statistics.median(begin.elapsed_time(end) for begin, end in times) / 1e3
    return 2 * size**3 / seconds


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write(path: Path, values: dict[str, Any]) -> None:
    """A cache only: a directory that cannot be written costs a measurement a run."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(values, indent=2))
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)


def flops_per_token(matrix_parameters: int, num_layers: int, attention_width: int, context: int) -> float:
    """Training FLOPs a token: 6 a matrix parameter, and 6 · layers · width · context for causal attention.

    The factor is 2 (multiply-add) · 3 (forward and both backward products); causal attention multiplies QKᵀ and PV
    over half of the context: 2 · 2 · width · context / 2 forward, times 3 (arXiv:2204.02311, appendix B, halved).
    """
    return 6.0 * matrix_parameters + 6.0 * num_layers * attention_width * context
