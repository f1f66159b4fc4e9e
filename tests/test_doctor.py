"""``crucible doctor`` on machines with and without what it looks for."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crucible.cli import main
from crucible.commands import doctor
from crucible.kernels.device import gpu_available

real_import = importlib.import_module


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """``names`` cannot be imported."""

    def load(name: str, package: str | None = None) -> Any:
        if name in names:
            raise ImportError(f"No module named {name!r}")
        return real_import(name, package)

    monkeypatch.setattr(importlib, "import_module", load)


def fake_cupy(monkeypatch: pytest.MonkeyPatch, *, arch: int = 90, driver: int = 13000, devices: int = 1) -> None:
    properties = {
        "name": b"Test GPU", "major": arch // 10, "minor": arch % 10, "totalGlobalMem": 80 << 30,
        "multiProcessorCount": 132,
    }  # fmt: skip
    runtime = SimpleNamespace(
        runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: driver, getDeviceCount=lambda: devices,
        getDeviceProperties=lambda index: properties,
    )  # fmt: skip
    module = SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))

    def load(name: str, package: str | None = None) -> Any:
        return module if name == "cupy" else real_import(name, package)

    monkeypatch.setattr(importlib, "import_module", load)
    smi = dict(zip(doctor.SMI_FIELDS, ("580.1", "Test GPU", "700", "750"), strict=True))
    monkeypatch.setattr(doctor, "nvidia_smi", lambda index=0: smi)
    monkeypatch.setattr("crucible.kernels.source.nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr("crucible.kernels.source.options", lambda source, arch: ())


def test_a_machine_that_computes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "device cpu: usable" in out
    for name in ("compiled modules", "libgomp", "Numba cache", "cubin cache", "default model", "driver", "NVRTC"):
        assert name in out
    assert ("device cuda: usable" in out) == gpu_available()


def test_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_cupy(monkeypatch)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Test GPU, sm_90, 80 GiB, 132 processors, power limit 700 of 750 W" in out
    assert "580.1, for CUDA up to 13.0" in out
    assert "for sm_90, which NVRTC knows" in out
    assert "device cuda: usable" in out


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"arch": 75}, "kernels need more than sm_75"),
        ({"driver": 12080}, "older than CuPy's runtime"),
        ({"driver": 0}, "no NVIDIA driver is loaded"),
        ({"devices": 0}, "none is visible"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    changes: dict[str, int], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_cupy(monkeypatch, **changes)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert text in out
    assert "→" in out
    assert "device cuda: not usable" in out


def test_no_cupy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "cupy")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "pip install 'crucible-lm[cuda13]'" in out
    assert "device cuda: not usable" in out


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("numba.np.ufunc.omppool", "apt install libgomp1"),
        ("crucible.native.bpe", "build_ext --inplace"),
        ("numba", "pip install 'numba"),
    ],
)
@pytest.mark.skipif(gpu_available(), reason="a GPU computes without them")
def test_nothing_to_compute_on(
    missing: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, missing)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert advice in out
    assert "device cpu: not usable" in out


def test_a_probe_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "openmp", broken)
    assert main(["doctor"]) == (0 if gpu_available() else 1)
    assert "RuntimeError: two lines" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("CRUCIBLE_CACHE", str(file / "below"))
    assert main(["doctor"]) == 0
    assert "set CRUCIBLE_CACHE" in capsys.readouterr().out


def test_a_model_that_was_not_pulled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CRUCIBLE_CACHE", str(tmp_path))
    monkeypatch.setattr("crucible.models.embedded_directory", lambda: None)
    assert main(["doctor"]) == 0
    assert "crucible pull" in capsys.readouterr().out
