"""CUDA sources and their cubins: NVRTC compiles for any architecture, with or without a GPU, once for each machine.

Knows nothing of what a kernel computes or how it is launched. CuPy is imported on the first compile. The sources need
no header but their own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crucible.config.paths import cache_directory
from crucible.errors import ConfigError, EngineError

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities (times ten) that every source is compiled for in the tests."""

MAX_SHARED_BYTES = 99 * 1024
"""Most shared memory of a block, static and dynamic: what sm_120 has."""

Say = Callable[[str], None]
INSTALL = "install it with: pip install 'crucible-lm[cuda13]' (cuda12 for a driver of CUDA 12)"


@dataclass(frozen=True)
class KernelUsage:
    """What ptxas reports of one kernel: registers a thread; bytes of spills, stack and static shared memory."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """One source compiled for one architecture, and the usage of each kernel in it."""

    source: str
    arch: int
    data: bytes
    kernels: Mapping[str, KernelUsage]


# ---- sources


def source_dir() -> Path:
    """The directory of package ``crucible.cuda``; beside the package in a tree that was only built in place."""
    spec = importlib.util.find_spec("crucible.cuda")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / "cuda"


def source_names() -> list[str]:
    """The .cu files, sorted."""
    return sorted(path.name for path in source_dir().glob("*.cu"))


def included(source: str) -> list[str]:
    """``source`` and all files of ``source_dir`` that it includes, at whatever depth, sorted."""
    found: set[str] = set()
    wanted = [source]
    while wanted:
        name = wanted.pop()
        path = source_dir() / name
        if name not in found and path.exists():
            found.add(name)
            wanted += re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    return sorted(found)


def sources_hash(source: str) -> str:
    """Sixteen hex digits that change with any byte or name of what ``source`` is made of."""
    digest = hashlib.sha256()
    for name in included(source):
        data = (source_dir() / name).read_bytes()
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


# ---- NVRTC


@cache
def _nvrtc() -> Any:
    """CuPy's NVRTC binding. Raises ConfigError when CuPy or the NVRTC library is missing."""
    try:
        importlib.import_module("cupy")  # finds the libraries of the nvidia-* wheels
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise ConfigError(f"CUDA kernels need CuPy, which cannot be imported ({error}); {INSTALL}") from None
    try:
        nvrtc.getVersion()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"CUDA kernels need NVRTC, which cannot be loaded ({error}); {INSTALL}") from None
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library. Raises ConfigError when there is none."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def options(source: str, arch: int, defines: Mapping[str, str | int] | None = None) -> tuple[str, ...]:
    """NVRTC's options for ``source``, all but the include path. Raises ConfigError for an architecture it
    cannot do."""
    if arch < 80:
        raise ConfigError(f"CUDA kernels need compute capability 8.0 or later, got {arch // 10}.{arch % 10}")
    supported = [int(a) for a in _nvrtc().getSupportedArchs()]
    if arch not in supported:
        version = ".".join(map(str, nvrtc_version()))
        raise ConfigError(
            f"NVRTC {version} cannot compile for sm_{arch} (up to sm_{max(supported)}); update nvidia-cuda-nvrtc"
        )
    return (
        f"--gpu-architecture=sm_{arch}",
        "-std=c++17",
        "--fmad=true",
        "--ptxas-options=-v",
        f"-DCRUCIBLE_SOURCES=0x{sources_hash(source)}",
        *(f"-D{name}={value}" for name, value in sorted((defines or {}).items())),
    )


def parse_log(log: str) -> dict[str, KernelUsage]:
    """Registers and memory of each kernel from the output of ``--ptxas-options=-v``."""
    found: dict[str, dict[str, int]] = {}
    now: dict[str, int] = {}
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            now = found.setdefault(entry[1], {"registers": 0, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0})
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            now["stack_bytes"] = now.get("stack_bytes", 0) + int(frame[1])
            now["spill_bytes"] = now.get("spill_bytes", 0) + int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            now["registers"] = int(used[1])
            shared = re.search(r"(\d+) bytes smem", line)
            now["shared_bytes"] = int(shared[1]) if shared else 0
    return {name: KernelUsage(**values) for name, values in found.items()}


def _compile(source: str, arch: int, flags: Sequence[str]) -> Cubin:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram((source_dir() / source).read_text(encoding="utf-8"), source, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*flags, f"-I{source_dir()}"))
        except nvrtc.NVRTCError as fault:
            log = str(nvrtc.getProgramLog(program))
            first = next((line.strip() for line in log.splitlines() if "error" in line), str(fault))
            error = EngineError(f"{source} does not compile for sm_{arch}: {first}")
            error.add_note(log)
            raise error from None
        return Cubin(source, arch, bytes(nvrtc.getCUBIN(program)), parse_log(str(nvrtc.getProgramLog(program))))
    finally:
        nvrtc.destroyProgram(program)


# ---- cache


def cubin_cache() -> Path:
    """Where cubins are kept."""
    return cache_directory() / "cubins"


def _write(path: Path, data: bytes) -> None:
    """Under a temporary name, then renamed, so that a reader sees all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path, source: str, arch: int) -> Cubin | None:
    try:
        usage = json.loads(path.with_suffix(".json").read_bytes())
        data = path.read_bytes()
        if len(data) != usage["bytes"] or hashlib.sha256(data).hexdigest() != usage["sha256"]:
            return None
        kernels = {name: KernelUsage(**values) for name, values in usage["kernels"].items()}
        return Cubin(source, arch, data, kernels)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: compiled again


def compile_cubin(
    source: str, arch: int, defines: Mapping[str, str | int] | None = None, *, say: Say | None = None
) -> Cubin:
    """``source`` (a name in ``source_dir``) for compute capability ``arch`` / 10, from the cache if it is there.

    ``say`` gets one line before NVRTC runs, and none when the cubin was kept. Raises ConfigError when CuPy or NVRTC
    is missing or the architecture is not supported, EngineError when the source does not compile. A cache
    that cannot be written costs compiling again, nothing else.
    """
    if source not in source_names():
        raise ConfigError(f"no CUDA source {source!r} in {source_dir()}; known: {', '.join(source_names())}")
    flags = options(source, arch, defines)
    key = hashlib.sha256(json.dumps([flags, nvrtc_version()]).encode()).hexdigest()[:16]
    path = cubin_cache() / f"{Path(source).stem}-sm_{arch}-{key}.cubin"
    kept = _read(path, source, arch)
    if kept is not None:
        return kept
    if say is not None:
        say(f"compiling {source} for sm_{arch} (once; kept in {cubin_cache()})")
    cubin = _compile(source, arch, flags)
    kernels = {name: asdict(usage) for name, usage in cubin.kernels.items()}
    about = {"bytes": len(cubin.data), "sha256": hashlib.sha256(cubin.data).hexdigest(), "kernels": kernels}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, cubin.data)
        _write(path.with_suffix(".json"), json.dumps(about).encode())
    except OSError:
        pass
    return cubin


def compile_all(
    sources: Sequence[str],
    archs: Sequence[int],
    defines: Mapping[str, str | int] | None = None,
    *,
    workers: int = 2,
    say: Say | None = None,
) -> dict[tuple[str, int], Cubin]:
    """Each source for each architecture, as ``compile_cubin``, in ``workers`` threads (NVRTC releases the GIL)."""
    wanted = [(source, arch) for source in sources for arch in archs]
    with ThreadPoolExecutor(workers) as pool:
        cubins = list(pool.map(lambda pair: compile_cubin(pair[0], pair[1], defines, say=say), wanted))
    return dict(zip(wanted, cubins, strict=True))
