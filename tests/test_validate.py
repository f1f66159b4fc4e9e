"""``crucible validate``: every kernel passes, and a wrong result of any kernel is found and described.

In the emulator; ``-m gpu`` runs all cases on the GPU at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.cli import main
from crucible.commands.validate import Result, report, results, select
from crucible.engine.checks.suite import CHECKS
from crucible.errors import ConfigError
from crucible.kernels import comparison, validate
from crucible.kernels.device import CudaDevice
from crucible.kernels.problems import LINEAR
from crucible.kernels.table import KERNELS, KernelRow
from tests.kernels.cuda.emulated_device import EmulatedDevice
from tests.mutations.run import PATCHES, read


def families(row: KernelRow) -> list[str]:
    """The code that computes a kernel, without sizes and types of results; of a projection its epilogue's op, too."""
    if match := LINEAR.fullmatch(row.name):
        return [f"linear_{match['form'].rstrip('0123456789')}_{match['weights']}", row.op]
    name = row.name.removeprefix("crucible_")
    return [name if row.op == "embed" else re.sub(r"(_f16|_f32|_\d+)+$", "", name)]


FAMILIES = sorted({family for row in KERNELS for family in families(row)})


@pytest.fixture(scope="module")
def emulated() -> list[Result]:
    return list(results(EmulatedDevice(lazy=True), select(None, small=True), "reference"))


def test_every_kernel_is_within_its_bound(emulated: list[Result]) -> None:
    assert [f"{r.kernel} {r.label}: {r.error} {r.fault}" for r in emulated if r.fault] == []
    assert {r.kernel for r in emulated} == {row.name for row in KERNELS}
    assert all(r.why for r in emulated)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_within_its_bound(family: str) -> None:
    """What a bug in one place changes (tests/mutations). One form of a projection is enough for its epilogue."""
    cases = [check for check in select(None, small=True) if family in families(check.kernel)]
    if family in validate.MAKERS and any("_scalar_" in check.kernel.name for check in cases):
        cases = [check for check in cases if "_scalar_" in check.kernel.name]
    assert cases
    for result in results(EmulatedDevice(lazy=True), cases, "reference"):
        assert not result.fault, f"{result.kernel} {result.label}: {result.fault}"


def test_bounds_are_no_wider_than_they_need_be(emulated: list[Result]) -> None:
    """Of rounding to halves an eighth is always met; sums of K terms are known to be far below K · 2⁻²⁴."""
    halves = [r for r in emulated if "halves" in r.why and r.bound > 3e-4]
    assert len(halves) > 50
    assert all(r.error > r.bound / 8 for r in halves)


def test_the_full_table_has_every_kernel_and_geometry() -> None:
    checks = validate.checks()
    assert {check.kernel.name for check in checks} == {row.name for row in KERNELS}
    for name in validate.GEOMETRIES:
        assert any(check.label.startswith(name) for check in checks)
    assert 1000 < len(checks) < 2000


def test_every_check_has_a_mutation_that_it_notices() -> None:
    """Families of kernels and checks of the exactness suite; tests/mutations/run.py sees to the noticing."""
    wanted = {f"validate {family}" for family in FAMILIES} | {f"check {name}" for name in CHECKS}
    planted = [mutation for mutation in map(read, sorted(PATCHES.glob("*.patch"))) if mutation.check]
    assert wanted == {mutation.check for mutation in planted}
    for mutation in planted:
        command, name = mutation.check.split()
        tests = " ".join(mutation.tests)
        if command == "validate":
            assert tests == f"tests/test_validate.py::test_a_family_is_within_its_bound[{name}]", mutation.name
        else:
            assert re.match(r"tests/engine/test_(device_)?checks\.py::", tests), mutation.name
            assert name in tests, mutation.name


@pytest.mark.gpu
def test_every_kernel_on_the_gpu() -> None:
    found = list(results(CudaDevice(), select(None), "reference"))
    assert [f"{r.number} {r.kernel} {r.label}: {r.error} {r.fault}" for r in found if r.fault] == []


def test_the_cpus_operations_can_be_what_is_right() -> None:
    found = list(results(EmulatedDevice(), select("small8_int8_swiglu", small=True), "cpu"))
    assert len(found) == 2
    assert not any(r.fault for r in found)


class Wrong(EmulatedDevice):
    """Changes the last element that a kernel writes by ten parts in a thousand, or what ``how`` says."""

    def __init__(self, how: str = "value") -> None:
        super().__init__()
        self.how = how

    def launch(self, name: str, grid: Any, *arguments: Any) -> None:
        super().launch(name, grid, *arguments)
        rows = {a.name: i for i, a in enumerate(validate_row(name).arguments)}
        target = next(rows[n] for n in ("out", "q" if "_qkv" in name else "out", "tokens", "ids") if n in rows)
        out = arguments[target]
        if self.how == "value":
            width = arguments[rows["outputs"]] if "outputs" in rows else None
            if "_attention" in name:
                width = 64 * arguments[rows["heads"]]
            elif "width" in rows:
                width = arguments[rows["width"]]
            elif "_qkv" in name:
                width = arguments[rows["heads"]] * arguments[rows["head_dim"]]
            flat = out.reshape(len(out), -1)[:, :width] if out.ndim > 1 else out
            flat[-1, ...] = flat[-1] * out.dtype.type(1.01) if out.dtype.kind == "f" else flat[-1] + 1
        elif self.how == "padding":
            out[0, -1] = 1
        elif self.how == "cache":
            arguments[rows["k_cache"]][0, 0] = 0
        elif self.how == "nan":
            out[0, 0] = np.nan


def validate_row(name: str) -> Any:
    return next(row for row in KERNELS if row.name == name)


@pytest.mark.parametrize("op", validate.MAKERS)
def test_a_wrong_result_is_found(op: str) -> None:
    cases = [check for check in select(op, small=True) if not check.kernel.name.endswith("_128")]
    firsts = {check.kernel.name: check for check in reversed(cases)}
    for result in results(Wrong(), list(firsts.values()), "reference"):
        assert re.search(r"output 0: element \[.*\] is .*, expected ", result.fault), (result.kernel, result.error)


def one(name: str, how: str) -> Result:
    return next(iter(results(Wrong(how), select(name, small=True), "reference")))


def test_what_a_kernel_does_beside_its_result_is_found() -> None:
    assert "padding of the output was written" in one("rmsnorm_f16", "padding").fault
    assert "padding of the output was written" in one("linear_small8_int8_swiglu", "padding").fault
    assert "k was written at" in one("linear_small8_int8_qkv", "cache").fault
    nan = one("linear_small8_int8_store", "nan")
    assert nan.error == np.inf
    assert "infinitely many ulps of float32" in nan.fault


def test_a_kernel_that_was_not_launched_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible.kernels.problems.LINEAR", re.compile("none"))
    result = next(iter(results(EmulatedDevice(), select("linear_big64_int8_add", small=True), "reference")))
    assert re.search(r"it was not launched, but crucible_linear_(small|big)\d+_int8_add", result.fault)


def test_the_first_fault() -> None:
    want = np.array([[1.0, 2.0], [4.0, 8.0]])
    got = want.astype(np.float32)
    got[1, 0] = np.nextafter(np.float32(4), np.float32(5))
    assert comparison.error(got, want) == pytest.approx(2.0**-21 / 8)
    assert comparison.first_fault(got, want, 1e-9) == (
        "element [1, 0] is 4.00000048, expected 4, 1 ulps of float32 (1 of 4 elements exceed the bound)"
    )
    assert comparison.ulps(np.float16(-0.0), 0.0) == 0
    assert comparison.ulps(np.float16(-(2.0**-24)), 2.0**-24) == 2
    assert comparison.error(got[:1], want) == np.inf


def test_the_command_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["validate", "norm", "--device", "cpu", "--case", "1", "--dump", str(tmp_path / "d")]) == 0
    out = capsys.readouterr().out
    assert "cpu against reference" in out
    assert "validate: 1 cases, all within their bounds" in out
    saved = np.load(tmp_path / "d" / "0001-norm.npz")
    assert np.abs(saved["got_0"] - saved["want_0"]).max() < 1e-5


def test_a_dump_has_what_a_kernel_was_given(tmp_path: Path) -> None:
    check = select("linear_small8_int8_add", small=True)
    list(results(EmulatedDevice(), check, "reference", 1, str(tmp_path)))
    (path,) = tmp_path.iterdir()
    assert path.name == "0001-crucible_linear_small8_int8_add.npz"
    saved = np.load(path)
    assert set(saved.files) == {"got_0", "want_0", "weights_0", "vector_0", "vector_1"}
    assert saved["weights_0"].shape == (70, 48)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cpu", "nothing"], "no operation of the CPU is named 'nothing'"),
        (["--device", "cpu", "--against", "cpu"], "compares with the CPU"),
        (["--device", "cpu", "norm", "--case", "99"], "--case must lie in 0 … 3, got 99"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_an_unknown_kernel() -> None:
    with pytest.raises(ConfigError, match="no kernel is named 'gemm'"):
        select("gemm")


def test_a_failure_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def found() -> Iterator[Result]:
        yield Result(0, "crucible_a", "in", 1e-8, 1e-7, "because")
        yield Result(1, "crucible_b", "in", 1e-6, 1e-7, "because", "output 0: element [3] is 1, expected 2")

    assert report(found(), "here") == 1
    out = capsys.readouterr().out
    assert "FAILED: output 0: element [3] is 1, expected 2" in out
    assert "2 cases, 1 FAILED" in out
    assert out.count("because") == 1
