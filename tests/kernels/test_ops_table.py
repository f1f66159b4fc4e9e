"""Every op of the table against its oracle, and the bit class the table states for it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from crucible.kernels.ops_table import OPS, Case, OpRow
from crucible.model.cpu_ops import CpuOps
from crucible.model.reference_ops import ReferenceOps

CASES = [pytest.param(row, case, id=f"{row.name}-{case}") for row in OPS for case in row.cases]


def cpu_ops(case: Case, threads: int | None = None) -> CpuOps:
    return CpuOps(case.config, context=case.config.context_length, threads=threads)


@pytest.mark.parametrize(("row", "case"), CASES)
def test_cpu_agrees_with_the_oracle(row: OpRow, case: Case) -> None:
    got = row.run(cpu_ops(case), case, np.random.default_rng(7))
    want = row.run(ReferenceOps(case.config), case, np.random.default_rng(7))
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == np.float32
        assert ours.shape == exact.shape
        assert np.abs(ours - exact).max() / np.abs(exact).max() <= row.tolerance(case)


@pytest.mark.parametrize(("row", "case"), CASES)
def test_thread_count_does_not_change_bits(row: OpRow, case: Case) -> None:
    one = [a.copy() for a in row.run(cpu_ops(case, threads=1), case, np.random.default_rng(3))]
    two = row.run(cpu_ops(case, threads=2), case, np.random.default_rng(3))
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 63, 64, 65, 130])
@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize(("k", "n"), [(5, 3), (128, 64), (129, 65), (200, 200)])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(rows: int, quant: str, k: int, n: int) -> None:
    rng = np.random.default_rng(rows)
    ops = cpu_ops(OPS[0].cases[0])
    matrix = ops.pack([rng.standard_normal((n, k)).astype(np.float32)], None, quant)
    gated = ops.pack_gated(*(rng.standard_normal((n, k)).astype(np.float32) for _ in "gu"), None, quant)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    together, gates = np.zeros((rows, n), np.float32), ops.swiglu(x, gated).copy()
    ops.project_add(x, matrix, together)
    for row in range(rows):
        alone = np.zeros((1, n), np.float32)
        ops.project_add(x[row : row + 1], matrix, alone)
        assert np.array_equal(alone[0], together[row])
        assert np.array_equal(ops.swiglu(x[row : row + 1], gated)[0], gates[row])


def test_int8_packing_finds_the_grid_that_a_group_lies_on() -> None:
    """Each group of 32 inputs has its own scale; a scale up to a quarter above max / 127 is found if it fits better."""
    ops = cpu_ops(OPS[0].cases[0])
    rng = np.random.default_rng(4)
    steps = rng.integers(-118, 119, (66, 67))
    steps[:, [0, 32, 64]] = 118
    grid = np.repeat(np.array([0.25, 1.0, 0.00390625]), 32)[:67]
    rows = (steps * grid).astype(np.float32)
    rows[1] = 0.0
    matrix = ops.pack([rows], None, "int8")
    assert matrix.w.dtype == np.int8
    assert matrix.scale.shape == (2, 3, 64)
    assert np.array_equal(matrix.w[0, :, 0], steps[0])
    assert np.array_equal(matrix.w[1, :, 1], steps[65])
    assert matrix.scale[1, :, 1].tolist() == [0x7D00, 0x7F00, 0x7700]  # 2⁻², 1, 2⁻⁸
    assert not matrix.w[0, :, 1].any()
    assert not matrix.scale[0, :, 1].any()


def test_int8_packing_keeps_the_largest_weight_at_127_or_less() -> None:
    ops = cpu_ops(OPS[0].cases[0])
    rows = np.random.default_rng(5).standard_normal((640, 96)).astype(np.float32)
    matrix = ops.pack([rows], None, "int8")
    quotients = matrix.w.astype(np.int64)
    assert quotients.max() == 127
    assert quotients.min() >= -127
    largest = np.abs(rows).reshape(640, 3, 32).argmax(axis=2)
    signs = np.sign(np.take_along_axis(rows.reshape(640, 3, 32), largest[..., None], 2))[..., 0]
    held = quotients.transpose(0, 2, 1).reshape(640, 3, 32)
    assert (np.take_along_axis(held, largest[..., None], 2)[..., 0] * signs > 80).all()


def test_attention_never_reads_past_the_row() -> None:
    """What lies in later slots and unused pages, even NaN, cannot reach a result."""
    row = next(row for row in OPS if row.name == "attention")
    case = row.cases[1]
    plain = row.run(cpu_ops(case), case, np.random.default_rng(5))[0].copy()

    class Poisoned(CpuOps):
        def allocate_cache(self, num_pages: int) -> SimpleNamespace:
            cache = super().allocate_cache(num_pages)
            cache.k[:], cache.v[:] = np.nan, np.nan
            return cache

    poisoned = row.run(Poisoned(case.config, context=256), case, np.random.default_rng(5))[0]
    assert np.array_equal(plain, poisoned)
