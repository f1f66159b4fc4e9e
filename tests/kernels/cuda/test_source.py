"""CUDA sources compile for every architecture without a GPU, within the limits, and their cubins are kept."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crucible.errors import ConfigError, EngineError
from crucible.kernels import source
from crucible.kernels.source import ARCHITECTURES, MAX_SHARED_BYTES, KernelUsage, compile_all, compile_cubin, parse_log

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
ptxas         .     400 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 27 registers, used 0 barriers, 400 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4612 bytes smem
"""

KERNEL = """extern "C" __global__ void k(float* p) {
    __shared__ float s[64]; s[threadIdx.x] = p[0]; __syncthreads(); p[0] = s[SLOT]; }"""


@pytest.fixture
def nvrtc() -> Any:
    pytest.importorskip("cupy")
    return source._nvrtc()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of sources, and an empty cache."""
    path = tmp_path / "cuda"
    path.mkdir()
    (path / "k.cu").write_text(KERNEL)
    monkeypatch.setattr(source, "source_dir", lambda: path)
    monkeypatch.setenv("CRUCIBLE_CACHE", str(tmp_path / "cache"))
    return path


def test_the_log_of_ptxas() -> None:
    assert parse_log(LOG) == {"second": KernelUsage(27, 20, 400, 0), "first": KernelUsage(255, 0, 0, 4612)}
    assert parse_log("") == {}


def test_sources_are_those_of_the_package() -> None:
    assert (source.source_dir() / "order_key.h").exists()
    assert "select.cu" in source.source_names()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", source.source_names())
def test_every_source_compiles_within_the_limits(name: str, nvrtc: Any) -> None:
    for (_, arch), cubin in compile_all([name], ARCHITECTURES).items():
        assert cubin.kernels, f"{name} holds no kernel"
        for kernel, usage in cubin.kernels.items():
            where = f"{kernel} for sm_{arch}: {usage}"
            assert usage.spill_bytes == 0, where
            assert usage.stack_bytes == 0, where
            assert usage.shared_bytes <= MAX_SHARED_BYTES, where
            assert 0 < usage.registers <= 255, where


def test_a_spill_is_seen(nvrtc: Any, folder: Path) -> None:
    """One thread of a block of 1024 has 64 registers; 200 live values do not fit."""
    body = "".join(f"float v{i} = p[{i} * n];" for i in range(200)) + "__syncthreads();"
    body += "".join(f"p[{i}] = v{i} * v{(i * 7 + 3) % 200};" for i in range(200))
    (folder / "k.cu").write_text(f'extern "C" __global__ void __launch_bounds__(1024) k(float* p, int n) {{ {body} }}')
    assert compile_cubin("k.cu", 80).kernels["k"].spill_bytes > 0


def test_a_cubin_is_compiled_once(nvrtc: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = compile_cubin("k.cu", 90, {"SLOT": 3}, say=said.append)
    assert len(said) == 1
    assert "k.cu for sm_90" in said[0]
    assert first.kernels["k"].shared_bytes == 256
    monkeypatch.setattr(source, "_compile", None)
    assert compile_cubin("k.cu", 90, {"SLOT": 3}, say=said.append) == first
    assert len(said) == 1
    assert not list(source.cubin_cache().glob(".*")), "a temporary file is left"


def test_what_goes_into_a_cubin_is_in_its_key(nvrtc: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> bool:
        said: list[str] = []
        compile_cubin("k.cu", arch, {"SLOT": slot}, say=said.append)
        return bool(said)

    arch, slot = 80, 1
    assert compiled()
    slot = 2
    assert compiled()
    arch = 86
    assert compiled()
    (folder / "other.cu").write_text("// is not included")
    assert not compiled()
    (folder / "deep.h").write_text("// included by a header")
    (folder / "header.cuh").write_text('  # include "deep.h"')
    (folder / "k.cu").write_text('#include "header.cuh"\n' + KERNEL)
    assert compiled()
    (folder / "deep.h").write_text("// changed")
    assert compiled()
    monkeypatch.setattr(source, "nvrtc_version", lambda: (99, 0))
    assert compiled()
    assert not compiled()


@pytest.mark.parametrize("damage", ["cut", "changed", "no usage"])
def test_a_damaged_cubin_is_compiled_again(nvrtc: Any, folder: Path, damage: str) -> None:
    good = compile_cubin("k.cu", 80, {"SLOT": 1})
    (path,) = source.cubin_cache().glob("*.cubin")
    if damage == "no usage":
        path.with_suffix(".json").unlink()
    else:
        path.write_bytes(good.data[:-1] if damage == "cut" else b"x" + good.data[1:])
    said: list[str] = []
    assert compile_cubin("k.cu", 80, {"SLOT": 1}, say=said.append) == good
    assert said


def test_a_cache_that_cannot_be_written_costs_nothing_else(nvrtc: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert compile_cubin("k.cu", 80, {"SLOT": 1}).data.startswith(b"\x7fELF")


def test_a_source_that_does_not_compile(nvrtc: Any, folder: Path) -> None:
    with pytest.raises(EngineError, match=r"^k.cu does not compile for sm_80: k.cu\(2\): error: .*SLOT") as caught:
        compile_cubin("k.cu", 80)
    assert "\n" not in str(caught.value)
    assert caught.value.__notes__


@pytest.mark.parametrize(("arch", "message"), [(75, "compute capability 8.0 or later, got 7.5"), (999, "sm_999")])
def test_an_architecture_that_cannot_be(nvrtc: Any, arch: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compile_cubin("select.cu", arch)


def test_an_unknown_source(nvrtc: Any) -> None:
    with pytest.raises(ConfigError, match=r"no CUDA source 'nothing.cu'"):
        compile_cubin("nothing.cu", 90)


@pytest.mark.parametrize("missing", ["cupy", "cupy_backends.cuda.libs.nvrtc", "library"])
def test_without_cupy_or_nvrtc_the_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_version() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    def load(name: str) -> Any:
        if name == missing:
            raise ImportError(f"No module named {name!r}")
        return SimpleNamespace(getVersion=get_version)

    monkeypatch.setattr(importlib, "import_module", load)
    source._nvrtc.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'crucible-lm\[cuda13\]'") as caught:
        source.options("select.cu", 90)
    assert "\n" not in str(caught.value)
    source._nvrtc.cache_clear()
