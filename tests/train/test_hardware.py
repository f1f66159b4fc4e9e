"""Peaks, power and the count of operations."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest
import torch

from crucible_train import hardware, power
from crucible_train.hardware import datasheet_peak, flops_per_token, matmul_peak
from crucible_train.power import Power, PowerPoller, parse_smi
from crucible_train.presets import model_config
from crucible_train.run_meter import matrix_parameters


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
    ],
)
def test_datasheet(name: str, tflops: float | None) -> None:
    assert datasheet_peak(name) == (None if tflops is None else tflops * 1e12)


def test_a_cpu_has_no_peak() -> None:
    assert matmul_peak(torch.device("cpu")) is None


def test_the_peak_is_measured_once_a_device_and_power_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    limit = [700.0]
    monkeypatch.setenv("CRUCIBLE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(power, "read_power", lambda index: Power(limit[0], 1980))
    monkeypatch.setattr(hardware, "_measure", lambda device: measured.append(1.0) or 7e14)
    for watts in (700.0, 700.0, 135.0):
        limit[0] = watts
        assert matmul_peak(torch.device("cuda", 0)) == 7e14
    assert len(measured) == 2


def test_operations_of_a_token() -> None:
    config = model_config("120m")
    assert matrix_parameters(config) == 112_970_496 - (2 * 12 + 1) * 768
    assert matrix_parameters(model_config("120m", tied=False)) == matrix_parameters(config)
    assert matrix_parameters(model_config("120m", position="learned")) == matrix_parameters(config)
    total = flops_per_token(matrix_parameters(config), 12, 768, 1024)
    assert math.isclose(total, 6 * 112_951_296 + 6 * 12 * 768 * 1024)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("700.00, 1980\n", Power(700.0, 1980)), ("[N/A], 345", Power(None, 345)), ("", Power()), ("error", Power())],
)
def test_nvidia_smi_lines(line: str, expected: Power) -> None:
    assert parse_smi(line) == expected


def test_without_a_driver_the_columns_stay_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(power, "_reader", lambda index: lambda: power._from_smi("0"))
    poller = PowerPoller(0)
    assert poller.latest == Power()
    assert poller._thread is None
    poller.close()


def test_the_poller_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([Power(700.0, 1980)] + [Power(135.0, 900)] * 1000)
    monkeypatch.setattr(power, "_reader", lambda index: lambda: next(values))
    poller = PowerPoller(0, interval=0.01)
    assert poller.latest == Power(700.0, 1980)
    poller._stop.wait(0.3)
    assert poller.latest == Power(135.0, 900)
    poller.close()
    assert poller._thread is not None
    assert not poller._thread.is_alive()


def test_visible_devices_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert [power._physical(index) for index in (0, 1)] == ["3", "GPU-abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert power._physical(2) == "2"
