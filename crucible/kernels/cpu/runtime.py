"""Numba's set-up: threading layer, on-disk cache keyed by the kernel sources, number of threads, news of compiling.

Imported before any kernel module, because Numba reads the cache directory when a cached function is defined.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
from numba.core import config as numba_config
from numba.core import event

from crucible.config.paths import cache_directory
from crucible.config.processors import available_processors, spin_briefly
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
    spin_briefly()
    try:
        path.mkdir(parents=True, exist_ok=True)
        numba_config.CACHE_DIR = str(path)
    except OSError:
        pass  # an unwritable cache only costs compiling again: Numba falls back to __pycache__ or memory
    return path


CACHE = _configure()


class CompilationListener(event.Listener):  # type: ignore[misc]  # Numba is untyped
    """Calls ``say`` once, when Numba begins to compile a kernel; one that is loaded from the cache is no news.

    Asking Numba beats looking into the cache: which kernels a model needs depends on its weight type and architecture.
    It listens from its making until ``close``.
    """

    KIND = "numba:compile"

    def __init__(self, say: Callable[[], None]) -> None:
        self._say: Callable[[], None] | None = say
        event.register(self.KIND, self)

    def on_start(self, details: object) -> None:
        say, self._say = self._say, None
        if say is not None:
            say()

    def on_end(self, details: object) -> None:
        pass

    def close(self) -> None:
        event.unregister(self.KIND, self)


def set_threads(threads: int | None) -> int:
    """Use ``threads`` kernel threads (``None``: one a processor) and return the number. Raises ConfigError.

    It counts for kernels that the calling thread launches, until the next call: ``use_threads`` repeats it.
    """
    try:
        importlib.import_module("numba.np.ufunc.omppool")  # loads libgomp
    except ImportError as error:
        raise ConfigError(
            f"Numba's OpenMP layer cannot be loaded ({error}); install libgomp (Debian: apt install libgomp1)"
        ) from None
    limit = int(numba_config.NUMBA_NUM_THREADS)
    wanted = min(available_processors(), limit) if threads is None else threads
    if not 1 <= wanted <= limit:
        raise ConfigError(f"threads must lie in 1 … {limit} on this machine, got {wanted}")
    numba.set_num_threads(wanted)
    return wanted


def use_threads(threads: int) -> None:
    """``set_threads`` for a number that it returned; costs a microsecond."""
    numba.set_num_threads(threads)
