"""The launcher: what the driver is given, and what is refused before it is asked. A driver that only records."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crucible.errors import EngineError
from crucible.kernels import launch
from crucible.kernels.launch import Module
from crucible.kernels.source import Cubin
from crucible.kernels.table import KernelRow, arguments

ROW = KernelRow(
    "crucible_example", "example.cu", "norm", arguments("x:f16* w:f32*? rows:i32 eps:f32 ids:i32* any:any*"), 128,
    limits={"rows": range(1, 9)}, dependent=True,
)  # fmt: skip
WIDE = KernelRow(
    "crucible_wide", "wide.cu", "norm", arguments("heads:i32"), 64, limits={"heads": (64, 128)},
    shared=lambda values: values["heads"] * 1024, min_arch=90,
)  # fmt: skip


def array(pointer: int, dtype: str, size: int = 4) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=pointer), dtype=np.dtype(dtype), size=size)


class FakeDriver:
    """Functions are numbered; a launch reads its parameters as the kernel would, by ``types``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.names: dict[int, str] = {}
        self.types: dict[str, Sequence[Any]] = {row.name: row.ctypes for row in (ROW, WIDE)}

    def load(self, cubin: bytes) -> Any:
        self.calls.append(("load", cubin))
        return cubin

    def function(self, module: Any, name: str) -> int:
        self.names[len(self.names) + 100] = name
        return len(self.names) + 99

    def allow_shared(self, function: int, size: int) -> None:
        self.calls.append(("allow", self.names[function], size))

    def launch(
        self, function: int, grid: Any, threads: int, shared: int, stream: int, parameters: int, dependent: bool
    ) -> None:
        name = self.names[function]
        types = self.types[name]
        cells = (ctypes.c_void_p * len(types)).from_address(parameters)
        values = [kind.from_address(cell).value for kind, cell in zip(types, cells, strict=True)]
        self.calls.append(("launch", name, grid, threads, shared, stream, values, dependent))


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is compiled; the cubin of a source is its name. Returns the requests."""
    asked: list[Any] = []

    def compile_all(sources: Sequence[str], archs: Sequence[int], defines: Any = None, **_: Any) -> Any:
        asked.append((list(sources), list(archs), defines))
        return {(source, arch): Cubin(source, arch, source.encode(), {}) for source in sources for arch in archs}

    monkeypatch.setattr(launch, "compile_all", compile_all)
    return asked


GOOD = (array(4096, "float16"), array(8192, "float32"), 8, 1e-5, array(16, "int32"), array(32, "uint8"))


def module(driver: FakeDriver, arch: int = 90, **options: Any) -> Module:
    made = Module(arch, driver, (ROW, WIDE), **options)
    driver.calls.clear()
    return made


def test_a_launch(driver: FakeDriver) -> None:
    module(driver).launch(ROW, (3, 2), 128, 0, SimpleNamespace(ptr=77), *GOOD)
    ((_, name, grid, threads, shared, stream, values, dependent),) = driver.calls
    assert (name, grid, threads, shared, stream, dependent) == ("crucible_example", (3, 2, 1), 128, 0, 77, False)
    assert values == [4096, 8192, 8, np.float32(1e-5), 16, 32]


def test_numpy_numbers_and_null(driver: FakeDriver) -> None:
    values = (GOOD[0], None, np.int64(1), np.float64(2.5), *GOOD[4:])
    module(driver).launch(ROW, [1], 128, 0, 0, *values)
    assert driver.calls[0][6] == [4096, None, 1, 2.5, 16, 32]
    module(driver).launch(ROW, [1], 128, 0, 0, *GOOD[:3], 2, *GOOD[4:])
    assert driver.calls[0][6][3] == 2.0
    module(driver).launch(ROW, [1], 128, 0, 0, *GOOD[:3], -math.inf, *GOOD[4:])
    assert driver.calls[0][6][3] == -math.inf


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, None, "argument x of kernel crucible_example must be an array, got None"),
        (0, 4096, "argument x of kernel crucible_example must be a device array, got int"),
        (0, np.zeros(4, np.float16), "must be a device array, got ndarray"),
        (0, array(4096, "float32"), "argument x of kernel crucible_example must hold float16, got float32"),
        (0, array(0, "float16"), "argument x of kernel crucible_example is a null pointer"),
        (1, array(4096, "float16"), "argument w of kernel crucible_example must hold float32, got float16"),
        (2, 8.0, "argument rows of kernel crucible_example must be an int, got float"),
        (2, True, "argument rows of kernel crucible_example must be an int, got bool"),
        (2, 2**31, "argument rows of kernel crucible_example must fit 32 bits, got 2147483648"),
        (2, 9, "argument rows of kernel crucible_example must lie in 1 … 8, got 9"),
        (2, 0, "argument rows of kernel crucible_example must lie in 1 … 8, got 0"),
        (3, "1", "argument eps of kernel crucible_example must be a number, got str"),
        (3, True, "argument eps of kernel crucible_example must be a number, got bool"),
        (3, array(4096, "float32"), "argument eps of kernel crucible_example must be a number, got SimpleNamespace"),
    ],
)
def test_a_wrong_argument(driver: FakeDriver, place: int, value: Any, message: str) -> None:
    values = list(GOOD)
    values[place] = value
    with pytest.raises(EngineError, match=message):
        module(driver).launch(ROW, (1,), 128, 0, 0, *values)
    assert driver.calls == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0,)}, r"the grid must lie in 1 … .*, got \(0,\)"),
        ({"grid": (1, 65536)}, "the grid must lie in 1 …"),
        ({"grid": (1, 1, 65536)}, "the grid must lie in 1 …"),
        ({"grid": (2**31,)}, "the grid must lie in 1 …"),
        ({"grid": ()}, "the grid must lie in 1 …"),
        ({"grid": (1, 1, 1, 1)}, "the grid must lie in 1 …"),
        ({"block": 256}, "has blocks of 128 threads, got 256"),
        ({"shared": 16}, "needs 0 bytes of dynamic shared memory, got 16"),
        ({"args": GOOD[:-1]}, "takes 6 arguments, got 5"),
        ({"args": (*GOOD, 1)}, "takes 6 arguments, got 7"),
    ],
)
def test_a_wrong_geometry(driver: FakeDriver, change: dict[str, Any], message: str) -> None:
    call = {"grid": (1,), "block": 128, "shared": 0, "args": GOOD, **change}
    with pytest.raises(EngineError, match=message):
        module(driver).launch(ROW, call["grid"], call["block"], call["shared"], 0, *call["args"])
    assert driver.calls == []


def test_large_shared_memory_is_asked_for_once(driver: FakeDriver) -> None:
    wide = module(driver)
    for _ in range(2):
        wide.launch(WIDE, (1,), 64, 64 * 1024, 5, 64)
    assert [call[:3] for call in driver.calls] == [
        ("allow", "crucible_wide", 65536),
        ("launch", "crucible_wide", (1, 1, 1)),
        ("launch", "crucible_wide", (1, 1, 1)),
    ]
    with pytest.raises(EngineError, match="131072 bytes of shared memory exceed 101376"):
        wide.launch(WIDE, (1,), 64, 128 * 1024, 5, 128)


def test_the_allowed_values_are_named(driver: FakeDriver) -> None:
    with pytest.raises(EngineError, match="argument heads of kernel crucible_wide must lie in 64, 128, got 65"):
        module(driver).launch(WIDE, (1,), 64, 65 * 1024, 5, 65)


def test_a_kernel_of_a_later_architecture(driver: FakeDriver, compiled: list[Any]) -> None:
    older = module(driver, 80)
    assert compiled == [(["example.cu"], [80], None)]
    with pytest.raises(EngineError, match=r"crucible_wide is not loaded for sm_80 \(it needs sm_90\)"):
        older.launch(WIDE, (1,), 64, 64 * 1024, 0, 64)


@pytest.mark.parametrize(("arch", "overlap", "expected"), [(90, True, True), (90, False, False), (89, True, False)])
def test_a_dependent_launch_overlaps_only_where_kernels_wait(
    driver: FakeDriver, compiled: list[Any], arch: int, overlap: bool, expected: bool
) -> None:
    made = module(driver, arch, overlap=overlap)
    made.launch(ROW, (1,), 128, 0, 0, *GOOD, dependent=True)
    assert driver.calls[0][-1] is expected
    assert compiled[0][2] == ({"CRUCIBLE_PDL": 1} if expected else None)


def test_a_kernel_that_does_not_wait_is_no_dependent_launch(driver: FakeDriver) -> None:
    with pytest.raises(EngineError, match="crucible_wide does not wait for its predecessor"):
        module(driver, overlap=True).launch(WIDE, (1,), 64, 64 * 1024, 0, 64, dependent=True)


def test_a_launch_like_an_earlier_one_is_only_written_down(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(driver, overlap=True)
    made.queue(ROW.name, (3, 2), 77, GOOD)
    monkeypatch.setattr(launch, "convert", None)  # a second check would fail
    other = (array(64, "float16"), array(128, "float32"), 8, 2.5, array(48, "int32"), array(80, "float64"))
    made.queue(ROW.name, (3, 2), 78, other)
    first, second = driver.calls
    assert first == ("launch", ROW.name, (3, 2, 1), 128, 0, 77, [4096, 8192, 8, np.float32(1e-5), 16, 32], True)
    assert second == ("launch", ROW.name, (3, 2, 1), 128, 0, 78, [64, 128, 8, 2.5, 48, 80], True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: None}, "x of kernel crucible_example must be an array, got None"),
        ({0: array(64, "float32")}, "x of kernel crucible_example must hold float16, got float32"),
        ({0: array(0, "float16")}, "x of kernel crucible_example is a null pointer"),
        ({1: array(64, "float16")}, "w of kernel crucible_example must hold float32, got float16"),
        ({2: 9}, "rows of kernel crucible_example must lie in 1 … 8, got 9"),
        ({2: True}, "rows of kernel crucible_example must be an int, got bool"),
        ({2: 8.0}, "rows of kernel crucible_example must be an int, got float"),
        ({2: [8]}, "rows of kernel crucible_example must be an int, got list"),
        ({3: "1"}, "eps of kernel crucible_example must be a number, got str"),
        ({5: 4096}, "any of kernel crucible_example must be a device array, got int"),
        ({}, "takes 6 arguments, got 7"),
    ],
)
def test_a_wrong_launch_after_a_right_one(driver: FakeDriver, change: dict[int, Any], message: str) -> None:
    made = module(driver)
    made.queue(ROW.name, (1,), 0, GOOD)
    values = [change.get(place, value) for place, value in enumerate(GOOD)] + [1] * (not change)
    for _ in range(2):  # what was refused was not learned
        with pytest.raises(EngineError, match=message):
            made.queue(ROW.name, (1,), 0, values)
    with pytest.raises(EngineError, match="the grid must lie in"):
        made.queue(ROW.name, (0,), 0, GOOD)
    with pytest.raises(EngineError, match="no kernel crucible_missing for sm_90"):
        made.queue("crucible_missing", (1,), 0, GOOD)
    assert len(driver.calls) == 1


def test_shared_memory_of_a_queued_launch_is_the_tables(driver: FakeDriver) -> None:
    made = module(driver)
    for _ in range(3):
        made.queue(WIDE.name, (1,), 0, (64,))
    assert [call for call in driver.calls if call[0] == "allow"] == [("allow", WIDE.name, 64 * 1024)]
    assert [call[4] for call in driver.calls if call[0] == "launch"] == [64 * 1024] * 3
    with pytest.raises(EngineError, match="131072 bytes of shared memory exceed"):
        made.queue(WIDE.name, (1,), 0, (128,))


def test_a_number_that_no_limit_names_is_looked_at_when_it_does_not_fit(driver: FakeDriver) -> None:
    made = module(driver)
    made.queue(ROW.name, (1,), 0, GOOD)
    made.queue(ROW.name, (1,), 0, (*GOOD[:3], 1e39, *GOOD[4:]))
    assert driver.calls[1][6][3] == math.inf
