"""Runs CUDA kernels on the host: ``Emulated("norm.cu").launch(kernel, grid, block, shared_bytes, *arguments)``.

An argument is, by what the kernel declares: a C-contiguous numpy array for a pointer (any dtype; halves are float16;
copied in and, where writable, copied back; the same array given twice is one memory) or None for a null pointer; an
int; a float. Numbers may be numpy scalars. The kernel sees its arrays 16-byte aligned, each ending at a guard page.
EmulationError says what went wrong: see the head of emulator.h for what is caught and what kernels may use.

``order``: in which order threads and blocks run: "forward", "reversed" or "shuffled" (by ``seed``). A kernel's results
must not depend on it; running twice finds missing barriers.

``source`` is a file of cuda/ or any path; ``defines`` are macros. Libraries are kept in the temporary directory, by a
hash of all that went into them. Needs g++.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CUDA = HERE.parents[1] / "cuda"
FLAGS = ["-std=c++17", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fPIC", "-U_FORTIFY_SOURCE", "-w"]
FLAGS += ["-mavx2", "-mfma", "-mf16c"] if os.uname().machine == "x86_64" else []
ORDERS = ("forward", "reversed", "shuffled")
SCALARS = {"i": ctypes.c_int, "l": ctypes.c_longlong, "f": ctypes.c_float, "d": ctypes.c_double}


class EmulationError(Exception):
    """A kernel did what CUDA forbids, or was launched with arguments it does not take."""


class _Entry(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("signature", ctypes.c_char_p), ("call", ctypes.c_void_p)]


class Emulated:
    """The kernels of one source; ``kernels`` maps each name to its arguments, one letter each (p, i, l, f, d)."""

    def __init__(self, source: str | Path, defines: Sequence[str] = ()) -> None:
        path = CUDA / source
        self._library = ctypes.CDLL(str(_build(path, list(defines))))
        self._library.emulator_allocate.restype = ctypes.c_void_p
        self._library.emulator_allocate.argtypes = [ctypes.c_size_t]
        self._library.emulator_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.emulator_intact.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.emulator_run.restype = ctypes.c_char_p
        self._library.emulator_run.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
            ctypes.c_uint64,
        ]  # fmt: skip
        count = ctypes.c_int.in_dll(self._library, "emulator_entry_count").value
        entries = (_Entry * count).in_dll(self._library, "emulator_entries")
        self.kernels = {entry.name.decode(): entry.signature.decode() for entry in entries}
        self._calls = {entry.name.decode(): entry.call for entry in entries}

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared: int,
        *arguments: Any,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        """Runs ``kernel`` to its end; ``shared`` is the dynamic shared memory in bytes."""
        signature = self.kernels[kernel]
        if len(arguments) != len(signature):
            raise EmulationError(f"{kernel} takes {len(signature)} arguments, not {len(arguments)}")
        grid, block = _dimensions(grid), _dimensions(block)
        threads = block[0] * block[1] * block[2]
        if not 0 < threads <= 1024:
            raise EmulationError(f"{kernel}: a block has 1 to 1024 threads, not {threads}")
        if 0 in grid:
            raise EmulationError(f"{kernel}: an empty grid {tuple(grid)}")
        memory: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}
        cells = []
        try:
            for index, (kind, value) in enumerate(zip(signature, arguments, strict=True)):
                where = f"{kernel}: argument {index}"
                if kind == "p":
                    cells.append(ctypes.c_void_p(None if value is None else self._array(memory, value, where)))
                elif kind in "fd" and not isinstance(value, (float, np.floating)):
                    raise EmulationError(f"{where} is a float, not {value!r}")
                elif kind in "il" and not isinstance(value, (int, np.integer)):
                    raise EmulationError(f"{where} is an integer, not {value!r}")
                else:
                    cells.append(SCALARS[kind](value))
            pointers = (ctypes.c_void_p * max(1, len(cells)))(*[ctypes.addressof(cell) for cell in cells])
            fault = self._library.emulator_run(
                self._calls[kernel], pointers, grid, block, shared, ORDERS.index(order), seed
            )
            if fault:
                raise EmulationError(f"{kernel}: {fault.decode(errors='replace')}")
            self._copy_back(kernel, memory)
        finally:
            for address, value in memory.values():
                self._library.emulator_free(address, value.nbytes)

    def _array(self, memory: dict[int, tuple[int, np.ndarray[Any, Any]]], value: Any, where: str) -> int:
        if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
            raise EmulationError(f"{where} is a pointer: give a C-contiguous array or None, not {type(value).__name__}")
        key = value.ctypes.data if value.nbytes else id(value)
        if key in memory:
            if memory[key][1].nbytes != value.nbytes:
                raise EmulationError(f"{where} overlaps another array")
            return memory[key][0]
        address = self._library.emulator_allocate(value.nbytes)
        memory[key] = address, value
        ctypes.memmove(address, value.ctypes.data, value.nbytes)
        return int(address)

    def _copy_back(self, kernel: str, memory: dict[int, tuple[int, np.ndarray[Any, Any]]]) -> None:
        for address, value in memory.values():
            if not self._library.emulator_intact(address, value.nbytes):
                raise EmulationError(f"{kernel}: a write beyond an array {value.dtype} {value.shape}")
            if value.flags.writeable:
                ctypes.memmove(value.ctypes.data, address, value.nbytes)
            elif ctypes.string_at(address, value.nbytes) != value.tobytes():
                raise EmulationError(f"{kernel}: a write to a read-only array {value.dtype} {value.shape}")


def _dimensions(value: int | Sequence[int]) -> Any:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return (ctypes.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes)))


def _build(source: Path, defines: list[str]) -> Path:
    """The shared library of ``source``, compiled when anything it is made of has changed."""
    options = [*FLAGS, "-DCRUCIBLE_EMULATED", *(f"-D{d}" for d in defines), f"-I{HERE}", f"-I{CUDA}"]
    text = _compile(["-E", "-P", "-x", "c++", *options, str(source)])
    names = sorted(set(re.findall(r'extern\s+"C"\s+__attribute__\s*\(\(.*?\)\)\s*void\s+(\w+)\s*\(', text)))
    if not names:
        raise EmulationError(f'{source}: no extern "C" __global__ void kernel found')
    digest = hashlib.sha256("\0".join([text, *options, *names]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"crucible-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{source.stem}-{digest}.so"
    if not library.exists():
        entries = "\n".join(f"EMULATED_ENTRY({name})" for name in names)
        wrapper = folder / f"{source.stem}-{digest}-{os.getpid()}.cpp"
        wrapper.write_text(
            f'#include "{source}"\nextern "C" {{\n'
            f"extern const emulator::Entry emulator_entries[] = {{\n{entries}\n}};\n"
            f"extern const int emulator_entry_count = {len(names)};\n}}\n"
        )
        made = wrapper.with_suffix(".so.tmp")
        try:
            _compile(["-shared", "-o", str(made), *options, str(wrapper)])
            os.replace(made, library)
        finally:
            wrapper.unlink()
    return library


def _compile(arguments: list[str]) -> str:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"g++ failed:\n{done.stderr[-4000:]}")
    return done.stdout
