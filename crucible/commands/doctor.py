"""``crucible doctor``: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crucible import __version__
from crucible.commands.options import Subparsers

NATIVE = ("batch", "bpe", "pages", "sampling")
SMI_FIELDS = ("driver_version", "name", "enforced.power.limit", "power.max_limit")
OK, NOTE, FAULT = "ok", "note", "FAULT"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine can compute on, and what to do where it cannot",
        description=(
            "Looks at compiled modules, Numba and its OpenMP, the GPU, its driver, CuPy and NVRTC, the caches and the "
            "default model, and says for each trouble what to do. Exit code 0 when an engine can run on some device, "
            "1 when none can. Downloads and compiles nothing."
        ),
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Finding:
    """One line. state: OK, NOTE (works without) or FAULT; do: what helps, for the last two."""

    name: str
    state: str
    text: str
    do: str = ""


def run(args: argparse.Namespace) -> int:
    print(f"crucible {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    common = show("crucible", [native_modules, kernel_sources])
    cpu = show("cpu", [numba, openmp, numba_cache]) and common
    cuda = show("cuda", [cupy, nvrtc, gpu, architecture, dependent_launches, cubin_cache]) and common
    show("model", [default_model])
    for device, usable in (("cpu", cpu), ("cuda", cuda)):
        print(f"device {device}: {'usable' if usable else 'not usable'}")
    return 0 if cpu or cuda else 1


def show(title: str, probes: list[Callable[[], Iterator[Finding]]]) -> bool:
    """Prints what the probes find; whether none is a fault. What a probe raises is a fault of its own."""
    print(f"{title}:")
    usable = True
    for probe in probes:
        try:
            findings = list(probe())
        except Exception as error:  # a doctor does not fall ill: whatever a broken installation raises is a finding
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            findings = [Finding(probe.__name__.replace("_", " "), FAULT, reason, "reinstall what it names")]
        for found in findings:
            usable = usable and found.state != FAULT
            print(f"  {found.state:<6}{found.name:<20}{found.text}", flush=True)
            if found.do:
                print(f"  {'':<6}{'':<20}→ {found.do}")
    return usable


# ---- what both devices need


def native_modules() -> Iterator[Finding]:
    missing = []
    for name in NATIVE:
        try:
            importlib.import_module(f"crucible.native.{name}")
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        do = "reinstall crucible-lm; in a source tree: python setup.py build_ext --inplace"
        yield Finding("compiled modules", FAULT, f"missing: {', '.join(missing)}", do)
    else:
        yield Finding("compiled modules", OK, ", ".join(NATIVE))


def kernel_sources() -> Iterator[Finding]:
    from crucible.kernels.source import source_dir, source_names

    names = source_names()
    if names:
        yield Finding("CUDA sources", OK, f"{len(names)} in {source_dir()}")
    else:
        yield Finding("CUDA sources", NOTE, f"none in {source_dir()}", "reinstall crucible-lm, if you want the GPU")


# ---- the CPU


def numba() -> Iterator[Finding]:
    try:
        module = importlib.import_module("numba")
    except ImportError as error:
        yield Finding("Numba", FAULT, str(error), "pip install 'numba>=0.61'")
        return
    from crucible.config.processors import available_processors

    yield Finding("Numba", OK, f"{module.__version__}, {available_processors()} processors for this process")


def openmp() -> Iterator[Finding]:
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        yield Finding("OpenMP (libgomp)", FAULT, str(error), "install libgomp; Debian, Ubuntu: apt install libgomp1")
    else:
        yield Finding("OpenMP (libgomp)", OK, "Numba's layer loads")


def numba_cache() -> Iterator[Finding]:
    from crucible.kernels.cpu.runtime import kernel_cache

    yield cache("Numba cache", kernel_cache())


# ---- the GPU


def cupy() -> Iterator[Finding]:
    try:
        module = importlib.import_module("cupy")
    except ImportError as error:
        do = "for a GPU: pip install 'crucible-lm[cuda13]' (cuda12 for a driver of CUDA 12)"
        yield Finding("CuPy", FAULT, str(error).splitlines()[0], do)
        return
    runtime = module.cuda.runtime
    yield Finding("CuPy", OK, f"{module.__version__}, CUDA runtime {version(runtime.runtimeGetVersion())}")
    driver = int(runtime.driverGetVersion())
    smi = nvidia_smi()
    if not driver:
        yield Finding("driver", FAULT, "no NVIDIA driver is loaded", "install the driver; in a container: --gpus all")
        return
    named = f"{smi['driver_version']}, " if smi else ""
    text = f"{named}for CUDA up to {version(driver)}"
    if driver // 1000 < int(runtime.runtimeGetVersion()) // 1000:
        do = "update the driver, or install CuPy for its CUDA: pip install 'crucible-lm[cuda12]'"
        yield Finding("driver", FAULT, f"{text}, older than CuPy's runtime", do)
    else:
        yield Finding("driver", OK, text)


def nvrtc() -> Iterator[Finding]:
    from crucible.errors import CrucibleError
    from crucible.kernels.source import nvrtc_version

    try:
        found = ".".join(map(str, nvrtc_version()))
    except CrucibleError as error:
        yield Finding("NVRTC", FAULT, "cannot be loaded", str(error))
    else:
        yield Finding("NVRTC", OK, found)


def gpu() -> Iterator[Finding]:
    devices = properties()
    if not devices:
        yield Finding(
            "GPU", FAULT, "none is visible", "look at nvidia-smi and CUDA_VISIBLE_DEVICES; or use --device cpu"
        )
    for index, found in enumerate(devices):
        smi = nvidia_smi(index)
        power = f", power limit {smi['enforced.power.limit']} of {smi['power.max_limit']} W" if smi else ""
        memory = found["totalGlobalMem"] / 2**30
        processors = found["multiProcessorCount"]
        name, arch = found["name"].decode(), f"sm_{arch_of(found)}"
        yield Finding(f"GPU {index}", OK, f"{name}, {arch}, {memory:.0f} GiB, {processors} processors{power}")


def architecture() -> Iterator[Finding]:
    """Whether the first GPU, which the engine takes, has kernels and a compiler."""
    from crucible.errors import CrucibleError
    from crucible.kernels.source import options, source_names
    from crucible.kernels.table import KERNELS

    for found in properties()[:1]:
        arch = arch_of(found)
        lacking = [row.name for row in KERNELS if row.min_arch > arch]
        if lacking:
            text = f"{len(lacking)} of {len(KERNELS)} kernels need more than sm_{arch}"
            yield Finding("kernels", FAULT, text, "use a GPU of compute capability 8.0 or later, or --device cpu")
            continue
        try:
            options(source_names()[0], arch)
        except CrucibleError as error:
            yield Finding("kernels", FAULT, f"NVRTC does not know sm_{arch}", str(error))
        else:
            yield Finding("kernels", OK, f"{len(KERNELS)} for sm_{arch}, which NVRTC knows")


def dependent_launches() -> Iterator[Finding]:
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError:
        text, do = "cuda-bindings is absent: kernels do not overlap their launches", "pip install cuda-bindings"
        yield Finding("overlap", NOTE, text, do)
    else:
        yield Finding("overlap", OK, "cuda-bindings is there (used from sm_90 on)")


def cubin_cache() -> Iterator[Finding]:
    from crucible.kernels.source import cubin_cache as directory

    yield cache("cubin cache", directory())


def properties() -> list[Any]:
    """Of each GPU that CuPy sees; none where it sees none or is absent."""
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        return [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
    except Exception:  # no CuPy, no driver, an old one: the probes before have said so
        return []


def arch_of(found: Any) -> int:
    return int(found["major"]) * 10 + int(found["minor"])


def nvidia_smi(index: int = 0) -> dict[str, str] | None:
    """SMI_FIELDS of a GPU; None where nvidia-smi is absent or fails."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return None
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = [part.strip() for part in line.strip().split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else None


def version(number: int) -> str:
    """CUDA's 13020 as 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


# ---- caches and the model


def cache(name: str, directory: Path) -> Finding:
    """Its path, what it holds, and whether it can be written."""
    files = [path for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
    size = sum(path.stat().st_size for path in files) / 2**20
    text = f"{directory}, {len(files)} files, {size:.1f} MiB"
    if writable(directory):
        return Finding(name, OK, text)
    do = "kernels are compiled at every start; set CRUCIBLE_CACHE to a directory that can be written"
    return Finding(name, NOTE, f"{text}, cannot be written", do)


def writable(directory: Path) -> bool:
    """Whether files can be made in ``directory``, or it can be made."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        return False
    try:
        with tempfile.TemporaryFile(dir=directory):  # access() does not know of read-only mounts
            return True
    except OSError:
        return False


def default_model() -> Iterator[Finding]:
    from crucible.checkpoint import open_checkpoint
    from crucible.errors import CrucibleError
    from crucible.models import DEFAULT_MODEL, embedded_directory, pulled_directory

    path = embedded_directory()
    if path is None:
        path = pulled_directory(DEFAULT_MODEL)
        if not (path / "config.json").is_file():
            do = f"crucible pull {DEFAULT_MODEL}, or give every command a MODEL"
            yield Finding("default model", NOTE, f"{DEFAULT_MODEL} has not been pulled", do)
            return
    try:
        with open_checkpoint(path) as checkpoint:
            config = checkpoint.config
            sizes = f"{config.num_layers} layers, d {config.hidden_size}, {checkpoint.dtype}"
    except CrucibleError as error:
        yield Finding("default model", NOTE, str(error), f"crucible pull {DEFAULT_MODEL}, or reinstall crucible-lm")
    else:
        yield Finding("default model", OK, f"{path}, {sizes}")
