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


def test_int8_packing_rounds_halves_to_even_and_keeps_zero_rows() -> None:
    ops = cpu_ops(OPS[0].cases[0])
    rows = np.zeros((66, 67), np.float32)
    rows[0, :3] = [127.0, 0.5, 1.5]
    rows[0, 64:] = [0.0, 63.5, -31.75]  # the third group of inputs has its own scale, 0.5
    rows[0, 32] = 1.0  # scale 1/127, in 9 significant bits 0.0078735: 127.008 → 127
    rows[65, :3] = [-254.0, 3.0, 5.0]  # scale 2: 1.5 → 2, 2.5 → 2
    matrix = ops.pack([rows], None, "int8")
    assert matrix.w.dtype == np.int8
    assert matrix.w[0, :3, 0].tolist() == [127, 0, 2]
    assert matrix.w[0, 64:, 0].tolist() == [0, 127, -64]
    assert matrix.w[0, 32, 0] == 127
    assert matrix.scale[0, :, 0].tolist() == [0x7F00, 0x7802, 0x7E00]
    assert matrix.w[1, :3, 1].tolist() == [-127, 2, 2]
    assert matrix.scale.shape == (2, 3, 64)
    assert matrix.scale[1, 0, 1] == 0x8000
    assert not matrix.w[0, :, 1].any()


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
