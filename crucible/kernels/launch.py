"""Module: loads the cubins of a kernel table and launches by its rows, with every argument checked.

ctypes or CuPy alone would take a Python int as ``long long``, a float as ``double`` and any array as any pointer,
and the kernel would read its neighbour's bytes. What ``convert`` has found right once, a Site knows again.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Protocol

from crucible.errors import EngineError
from crucible.kernels.site import Site
from crucible.kernels.source import MAX_SHARED_BYTES, Say, compile_all
from crucible.kernels.table import ELEMENTS, KERNELS, Argument, KernelRow, no_shared

Grid = tuple[int, int, int]
GRID_LIMITS = (2**31 - 1, 65535, 65535)
INT_RANGE = range(-(2**31), 2**31)
STATIC_LIMIT = 48 * 1024  # dynamic shared memory above this must be asked for


class Driver(Protocol):
    """The few calls of the CUDA driver that launching needs; functions are handles."""

    def load(self, cubin: bytes) -> Any: ...
    def function(self, module: Any, name: str) -> int: ...
    def allow_shared(self, function: int, size: int) -> None: ...
    def launch(
        self, function: int, grid: Grid, threads: int, shared: int, stream: int, parameters: int, dependent: bool
    ) -> None: ...


class CupyDriver:
    """The driver through CuPy; launches that may overlap their predecessor through cuda.bindings, where installed."""

    _MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

    def __init__(self) -> None:
        self._function_module = importlib.import_module("cupy").cuda.function
        self._driver = importlib.import_module("cupy_backends.cuda.api.driver")
        try:
            self._bindings: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            self._bindings = None
        self._config: Any = None
        self._config_stream: int | None = None
        self._handles: dict[int, Any] = {}

    def load(self, cubin: bytes) -> Any:
        module = self._function_module.Module()
        module.load(cubin)
        return module

    def function(self, module: Any, name: str) -> int:
        return int(module.get_function(name).ptr)

    def allow_shared(self, function: int, size: int) -> None:
        self._driver.funcSetAttribute(function, self._MAX_DYNAMIC_SHARED, size)

    def launch(
        self, function: int, grid: Grid, threads: int, shared: int, stream: int, parameters: int, dependent: bool
    ) -> None:
        if dependent and self._bindings is not None:
            self._launch_dependent(function, grid, threads, shared, stream, parameters)
        else:
            self._driver.launchKernel(function, *grid, threads, 1, 1, shared, stream, parameters, 0)

    def _launch_dependent(
        self, function: int, grid: Grid, threads: int, shared: int, stream: int, parameters: int
    ) -> None:
        cu = self._bindings
        if self._config is None:
            self._config = _overlapping(cu)
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.sharedMemBytes = threads, shared
        if stream != self._config_stream:
            config.hStream, self._config_stream = cu.CUstream(stream), stream
        handle = self._handles.get(function)
        if handle is None:
            handle = self._handles[function] = cu.CUfunction(function)
        (result,) = cu.cuLaunchKernelEx(config, handle, parameters, 0)
        if result != cu.CUresult.CUDA_SUCCESS:
            raise EngineError(f"a dependent launch failed: {result}")


def _overlapping(cu: Any) -> Any:
    """A launch configuration that lets a kernel start before its predecessor has ended; made once, it takes 4 µs."""
    value = cu.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    config = cu.CUlaunchConfig()
    config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


class Module:
    """The compiled kernels of one architecture.

    ``arch``: compute capability times ten. ``driver``: None means CuPy's, which needs a GPU. ``overlap``: dependent
    launches may start before their predecessor has ended (from compute capability 9.0 on). ``say`` gets one line a
    source that must be compiled. Raises what ``source.compile_cubin`` raises.
    """

    def __init__(
        self,
        arch: int,
        driver: Driver | None = None,
        rows: Sequence[KernelRow] = KERNELS,
        *,
        overlap: bool = False,
        say: Say | None = None,
    ) -> None:
        rows = [row for row in rows if arch >= row.min_arch]
        self.overlap = overlap and arch >= 90
        # Without the define kernels do not wait, and a dependent launch would race with its predecessor.
        defines = {"CRUCIBLE_PDL": 1} if self.overlap else None
        cubins = compile_all(sorted({row.source for row in rows}), [arch], defines, say=say)
        self._driver = driver if driver is not None else CupyDriver()
        # Kept as long as their functions: a module that is collected is unloaded.
        self._modules = {source: self._driver.load(cubin.data) for (source, _), cubin in cubins.items()}
        self._functions: Mapping[str, int] = {
            row.name: self._driver.function(self._modules[row.source], row.name) for row in rows
        }
        self._shared = dict.fromkeys(self._functions, STATIC_LIMIT)
        self._sites = {row.name: Site(row, self._functions[row.name]) for row in rows}
        self.arch = arch

    def queue(self, name: str, grid: Sequence[int], stream: int, args: Sequence[Any]) -> None:
        """``launch`` as the table says: its block, its shared memory, dependent if it can be. One thread at a time.

        stream: a handle. A launch like an earlier one costs a fifth of ``launch``. Raises as ``launch`` does.
        """
        site = self._sites.get(name)
        if site is None:
            raise EngineError(f"there is no kernel {name} for sm_{self.arch}")
        row = site.row
        key = site.key(grid, args)
        shared = site.known.get(key) if key is not None else None
        if shared is not None and site.write(args):
            x, y, z = (*grid, 1, 1)[:3]
            dependent = row.dependent and self.overlap
            self._driver.launch(site.function, (x, y, z), row.threads, shared, stream, site.parameters, dependent)
            return
        shared = shared_bytes(row, grid, args)
        self.launch(row, grid, row.threads, shared, stream, *args, dependent=row.dependent)
        if key is not None:
            site.learn(key, shared)

    def launch(
        self,
        row: KernelRow,
        grid: Sequence[int],
        block: int,
        shared: int,
        stream: Any,
        *args: Any,
        dependent: bool = False,
    ) -> None:
        """Launch ``row`` with its arguments in order: device arrays (None where the row allows null), ints, floats.

        grid: one to three sizes. block: threads. shared: dynamic shared memory in bytes. stream: an object with ``ptr``
        (CuPy's) or a handle. dependent: may start before its predecessor in the stream has ended, if the module was
        made with ``overlap``. Raises EngineError for anything the row does not allow; nothing is launched then.
        """
        function = self._functions.get(row.name)
        if function is None:
            raise EngineError(f"kernel {row.name} is not loaded for sm_{self.arch} (it needs sm_{row.min_arch})")
        sizes, holders = convert(row, grid, block, shared, args)
        if dependent and not row.dependent:
            raise EngineError(f"kernel {row.name} does not wait for its predecessor and cannot be a dependent launch")
        if shared > self._shared[row.name]:
            self._driver.allow_shared(function, shared)
            self._shared[row.name] = shared
        parameters = (ctypes.c_void_p * len(holders))(*(ctypes.addressof(holder) for holder in holders))
        handle = int(getattr(stream, "ptr", stream))
        address = ctypes.addressof(parameters)
        self._driver.launch(function, sizes, block, shared, handle, address, dependent and self.overlap)


Holder = ctypes.c_void_p | ctypes.c_int | ctypes.c_float


def shared_bytes(row: KernelRow, grid: Sequence[int], arguments: Sequence[Any]) -> int:
    """Dynamic shared memory of a launch. Numbers that are none count as 0: ``convert`` refuses them."""
    if row.shared is no_shared:
        return 0
    numbers = {
        a.name: int(value) if isinstance(value, Integral) else 0
        for a, value in zip(row.arguments, arguments, strict=False)
        if a.ctype is ctypes.c_int
    }
    return row.shared({**numbers, "grid_x": int(grid[0]) if len(grid) else 0})


def convert(
    row: KernelRow, grid: Sequence[int], block: int, shared: int, args: Sequence[Any]
) -> tuple[Grid, list[Holder]]:
    """The grid in three sizes and the arguments as the C types of the row. Raises EngineError as ``Module.launch``."""
    if len(args) != len(row.arguments):
        raise EngineError(f"kernel {row.name} takes {len(row.arguments)} arguments, got {len(args)}")
    holders = [_convert(row, argument, value) for argument, value in zip(row.arguments, args, strict=True)]
    return _check_geometry(row, grid, block, shared, holders), holders


def _convert(row: KernelRow, argument: Argument, value: Any) -> Holder:
    """The value as the C type of the row. numpy scalars count as numbers, a bool does not."""
    where = f"argument {argument.name} of kernel {row.name}"
    if argument.element:
        return ctypes.c_void_p(_address(where, argument, value))
    if argument.ctype is ctypes.c_float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise EngineError(f"{where} must be a number, got {type(value).__name__}")
        return ctypes.c_float(float(value))
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise EngineError(f"{where} must be an int, got {type(value).__name__}")
    number = int(value)
    if number not in INT_RANGE:
        raise EngineError(f"{where} must fit 32 bits, got {number}")
    allowed = row.limits.get(argument.name)
    if allowed is not None and number not in allowed:
        raise EngineError(f"{where} must lie in {_range_text(allowed)}, got {number}")
    return ctypes.c_int(number)


def _address(where: str, argument: Argument, value: Any) -> int:
    if value is None:
        if argument.nullable:
            return 0
        raise EngineError(f"{where} must be an array, got None")
    pointer = getattr(getattr(value, "data", None), "ptr", None)
    if pointer is None:
        raise EngineError(f"{where} must be a device array, got {type(value).__name__}")
    wanted = ELEMENTS.get(argument.element)
    if wanted is not None and str(value.dtype) != wanted:
        raise EngineError(f"{where} must hold {wanted}, got {value.dtype}")
    if not pointer and value.size:
        raise EngineError(f"{where} is a null pointer")
    return int(pointer)


def _range_text(allowed: Any) -> str:
    if isinstance(allowed, range) and allowed.step == 1:
        return f"{allowed.start} … {allowed.stop - 1}"
    return ", ".join(map(str, allowed))


def _check_geometry(row: KernelRow, grid: Sequence[int], block: int, shared: int, holders: Sequence[Holder]) -> Grid:
    sizes = (*grid, 1, 1, 1)[:3]
    if not 1 <= len(grid) <= 3 or any(not 1 <= n <= limit for n, limit in zip(sizes, GRID_LIMITS, strict=True)):
        raise EngineError(f"kernel {row.name}: the grid must lie in 1 … {GRID_LIMITS}, got {tuple(grid)}")
    if block != row.threads:
        raise EngineError(f"kernel {row.name} has blocks of {row.threads} threads, got {block}")
    integers = {
        argument.name: int(holder.value)
        for argument, holder in zip(row.arguments, holders, strict=True)
        if isinstance(holder, ctypes.c_int)
    }
    needed = row.shared({**integers, "grid_x": sizes[0]})
    if shared != needed:
        raise EngineError(f"kernel {row.name} needs {needed} bytes of dynamic shared memory, got {shared}")
    if shared > MAX_SHARED_BYTES:
        raise EngineError(f"kernel {row.name}: {shared} bytes of shared memory exceed {MAX_SHARED_BYTES}")
    return sizes[0], sizes[1], sizes[2]
