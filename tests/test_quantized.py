"""QuantizedTensor: what int8 values and their scales stand for, and which stand for nothing."""

from __future__ import annotations

import numpy as np
import pytest

from crucible.kernels.constants import QUANT_GROUP
from crucible.quantized import GROUP, QuantizedTensor, scale_shape, scale_values

ONE = 0x7F00  # 1.0


def tensor(values: object, scales: object) -> QuantizedTensor:
    return QuantizedTensor(np.array(values, np.int8), np.array(scales, np.uint16))


def zeros(rows: int, columns: int, scale: int = ONE) -> QuantizedTensor:
    values = np.zeros((rows, columns), np.int8)
    return QuantizedTensor(values, np.full(scale_shape(values.shape), scale, np.uint16))


def test_the_stored_group_is_the_kernels_group() -> None:
    """The format is for ever; kernels of another group would have to convert."""
    assert GROUP == QUANT_GROUP


def test_scales_are_float32_without_sign_and_15_bits() -> None:
    codes = np.array([0, ONE, ONE + 1, ONE + 256, 0x7E80, 256], np.uint16)
    np.testing.assert_array_equal(scale_values(codes), np.float32([0, 1, 1 + 2**-8, 2, 0.75, 2.0**-126]))


def test_a_weight_is_value_times_the_scale_of_its_group() -> None:
    generator = np.random.default_rng(0)
    for rows, columns in ((1, 1), (3, 31), (2, 32), (5, 33), (4, 100)):
        values = generator.integers(-127, 128, (rows, columns)).astype(np.int8)
        scales = generator.integers(1, 0xF800, scale_shape(values.shape)).astype(np.uint16)
        weights = QuantizedTensor(values, scales).dequantize()
        assert weights.dtype == np.float32
        for row in range(rows):
            for column in range(columns):
                bits = np.uint32(scales[row, column // 32]) << np.uint32(15)
                exact = float(values[row, column]) * float(np.array(bits).view(np.float32))
                assert float(weights[row, column]) == exact


def test_outputs_are_concatenated_in_order() -> None:
    first, second = tensor([[1, 2]], [[3]]), tensor([[4, 5], [6, 7]], [[8], [9]])
    both = QuantizedTensor.concatenate([first, second])
    assert both.shape == (3, 2)
    np.testing.assert_array_equal(both.values, [[1, 2], [4, 5], [6, 7]])
    np.testing.assert_array_equal(both.scales, [[3], [8], [9]])
    alone = QuantizedTensor.concatenate([first])
    assert not np.shares_memory(alone.values, first.values)


@pytest.mark.parametrize(
    ("value", "scale", "words"),
    [
        (-128, ONE, "holds -128 at index [70, 33]; int8 weights lie in -127 … 127"),
        (-128, 0, "holds -128 at index [70, 33]"),
        (5, 0, "holds 5 at index [70, 33], where the scale is 0"),
        (-127, 0xF803, "holds -inf at index [70, 33]"),
        (1, 0xFF00, "holds nan at index [70, 32]"),
        (1, 0xFFFF, "holds nan at index [70, 32]"),
    ],
)
def test_the_first_weight_that_is_none_is_named(
    value: int, scale: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = zeros(100, 40)
    bad.values[70, 33] = bad.values[70, 39] = bad.values[99, 0] = value
    bad.scales[70, 1] = bad.scales[99, 0] = scale
    for chunk in (1 << 22, 40 * 32, 1):
        monkeypatch.setattr("crucible.quantized._CHUNK", chunk)
        assert words in (bad.fault() or "")


def test_the_ends_of_the_range_are_weights() -> None:
    good = zeros(4, 70)
    good.values[:] = 127
    good.values[1] = -127
    good.scales[2] = 0xF802  # 127 times it is below float32's largest
    good.scales[3] = 0
    good.values[3] = 0
    assert good.fault() is None
    assert np.isfinite(good.dequantize()).all()
    assert zeros(0, 5).fault() is None
    assert zeros(3, 0).fault() is None
    assert zeros(3, 40, scale=0).fault() is None
    large = zeros(1, 32, scale=0xFEFF)
    large.values[0, 5] = 1
    assert large.fault() is None
