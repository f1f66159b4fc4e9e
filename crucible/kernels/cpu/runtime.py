"""Numba's set-up: threading layer, on-disk cache keyed by the kernel sources, number of threads.

Imported before any kernel module, because Numba reads the cache directory when a cached function is defined.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path

import llvmlite
import numba
from numba.core import config as numba_config

from crucible.config.paths import cache_directory
from crucible.errors import ConfigError


def _source_key() -> str:
    """Numba's cache does not notice an edited callee in another file, so the directory names all sources."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    here = Path(__file__).parent
    for source in [here.parent / "constants.py", *sorted(here.glob("*.py"))]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def kernel_cache() -> Path:
    """The directory of the compiled kernels of this version of the sources."""
    return cache_directory() / "numba" / _source_key()


def _configure() -> Path:
    path = kernel_cache()
    # omp starts a parallel kernel in microseconds where workqueue needs a hundred, and workqueue aborts the
    # process when two threads launch at once.
    numba_config.THREADING_LAYER = "omp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        numba_config.CACHE_DIR = str(path)
    except OSError:
        pass  # an unwritable cache only costs compiling again: Numba falls back to __pycache__ or memory
    return path


CACHE = _configure()


def is_warm() -> bool:
    """Whether compiled kernels of these sources are on disk already."""
    return any(CACHE.rglob("*.nbi"))


def available_threads() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int | None) -> int:
    """Use ``threads`` kernel threads (``None``: one a processor) and return the number. Raises ConfigError."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")  # loads libgomp
    except ImportError as error:
        raise ConfigError(
            f"Numba's OpenMP layer cannot be loaded ({error}); install libgomp (Debian: apt install libgomp1)"
        ) from None
    limit = int(numba_config.NUMBA_NUM_THREADS)
    wanted = min(available_threads(), limit) if threads is None else threads
    if not 1 <= wanted <= limit:
        raise ConfigError(f"threads must lie in 1 … {limit} on this machine, got {wanted}")
    numba.set_num_threads(wanted)
    return wanted
