"""The oracle itself, against NumPy formulas written another way and against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from crucible import reference

RNG = np.random.default_rng(2)


def test_linear_and_embed() -> None:
    x, w, b = RNG.standard_normal((3, 5)), RNG.standard_normal((4, 5)), RNG.standard_normal(4)
    np.testing.assert_allclose(reference.linear(x, w, b), x @ w.T + b, rtol=1e-12)
    assert np.array_equal(reference.embed(w, np.array([3, 0])), w[[3, 0]])


def test_norms() -> None:
    x, w, b = RNG.standard_normal((3, 7)), RNG.standard_normal(7), RNG.standard_normal(7)
    want = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(reference.rmsnorm(x, w, 1e-5), want, rtol=1e-12)
    centred = x - x.mean(1, keepdims=True)
    want = centred / np.sqrt(x.var(1, keepdims=True) + 1e-5) * w + b
    np.testing.assert_allclose(reference.layernorm(x, w, b, 1e-5), want, rtol=1e-12)


def test_activations() -> None:
    x = np.array([[-2.0, 0.0, 1.0]])
    np.testing.assert_allclose(reference.swiglu(x, 2 * np.ones_like(x)), 2 * x / (1 + np.exp(-x)), rtol=1e-12)
    # Φ(−2) = 0.0227501319…, Φ(1) = 0.8413447460…
    np.testing.assert_allclose(reference.gelu(x, False), [[-0.0455002639, 0.0, 0.8413447461]], rtol=1e-9)
    np.testing.assert_allclose(reference.gelu(x, True), [[-0.0454023, 0.0, 0.8411920]], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_as_complex_numbers(interleaved: bool) -> None:
    x, positions, f = RNG.standard_normal((2, 3, 8)), np.array([5.0, 900.0]), np.array([1.0, 0.1, 0.01, 0.001])
    got = reference.rope(x, positions, f, 1.5, interleaved)
    turn = np.exp(1j * positions[:, None, None] * f) * 1.5
    z = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :4] + 1j * x[..., 4:]
    turned = z * turn
    back = got[..., 0::2] + 1j * got[..., 1::2] if interleaved else got[..., :4] + 1j * got[..., 4:]
    np.testing.assert_allclose(back, turned, rtol=1e-12)


def test_attention_is_a_masked_softmax_over_grouped_heads() -> None:
    q, k, v = RNG.standard_normal((3, 4, 6)), RNG.standard_normal((5, 2, 6)), RNG.standard_normal((5, 2, 6))
    slopes = np.array([0.5, 0.25, 0.125, 0.0])
    got = reference.attention(q, k, v, 2, slopes)
    for row in range(3):
        for head in range(4):
            seen = np.arange(row + 3)
            scores = k[seen, head // 2] @ q[row, head] / np.sqrt(6) + slopes[head] * (seen - (row + 2))
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(got[row, head], weights @ v[seen, head // 2], rtol=1e-12)


def test_quantize_groups_takes_the_scale_of_least_error() -> None:
    rows = np.array([[29.5, -0.25, 7.75, 1.27, 0.02], [0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
    got = reference.quantize_groups(rows, 3, 48)
    assert got[0, :3].tolist() == [29.5, -0.25, 7.75]  # 0.25 is 8 % above 29.5 / 127 and fits all three
    assert (np.abs(got[0, 3:] - rows[0, 3:]) <= 1.27 / 127 / 2).all()
    assert not got[1].any()
    codes = [float(reference.nine_bits(x)) for x in (1.0, 1.003, 0.01, 127.25)]
    assert codes == [1.0, 1.00390625, 0.010009765625, 127.25]
    assert float(reference.next_nine_bits(1.99609375)) == 2.0
