"""The one-operation SwiGLU is the plain one, in value and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crucible_train import fp8, swiglu

ROWS, WIDTH, INNER = 24, 32, 48


pytestmark = pytest.mark.usefixtures("one_thread")


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, inputs, down and the gradient that arrives."""
    generator = torch.Generator().manual_seed(3)
    shapes = (2, ROWS // 2, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER), (2, ROWS // 2, WIDTH)
    x, inputs, down, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.to(dtype), (inputs / 4).to(dtype), (down / 4).to(dtype), upstream.to(dtype)


def plain(x: Tensor, inputs: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, inputs).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def value_and_gradients(function: Callable[..., Tensor], *values: Tensor) -> list[Tensor]:
    *inputs, upstream = values
    leaves = [value.clone().requires_grad_() for value in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream.to(result.dtype))]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_the_plain_operations(dtype: torch.dtype, bound: float) -> None:
    got = value_and_gradients(swiglu.feed_forward, *problem(dtype))
    want = value_and_gradients(plain, *(value.double() for value in problem(dtype)))
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() <= bound * exact.norm()


def test_autocast_decides_the_type_and_float32_weights_get_float32_gradients() -> None:
    def under_autocast(*values: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return swiglu.feed_forward(*values)

    got = value_and_gradients(under_autocast, *problem(torch.float32))
    want = value_and_gradients(plain, *problem(torch.float32))
    assert [g.dtype for g in got] == [torch.bfloat16, *[torch.float32] * 3]
    for ours, exact in zip(got, want, strict=True):
        assert 0 < (ours.float() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("scales", ["row", "row-after"])
def test_fp8_products_stay_near(scales: fp8.Scales) -> None:
    got = value_and_gradients(lambda *v: swiglu.feed_forward(*v, scales), *problem(torch.float32))
    want = value_and_gradients(plain, *problem(torch.float32))
    for ours, exact in zip(got, want, strict=True):
        assert 0.005 * exact.norm() < (ours - exact).norm() <= 0.12 * exact.norm()


def test_rows_far_apart_in_size_keep_their_precision_in_fp8() -> None:
    """What a scale a row is for: one row's outlier leaves the others alone."""
    x, inputs, down, _ = problem(torch.float32)
    x[0, 0] *= 1e4
    got, want = swiglu.feed_forward(x, inputs, down, "row"), plain(x, inputs, down)
    assert ((got - want).norm(dim=-1) <= 0.12 * want.norm(dim=-1)).all()


def test_emitted_fp8_values_are_those_of_quantise_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(7, 2 * INNER, generator=generator)
    d_inner = torch.randn(7, INNER, generator=generator)
    inner, _ = swiglu.product(both, False)
    rounded, scale = swiglu.product(both, True)
    want, want_scale = fp8.quantise_rows(inner, fp8.E4M3)
    assert torch.equal(rounded.float(), want.float())
    assert torch.equal(scale, want_scale)
    d_both, rounded, scale, again = swiglu.product_gradient(both, d_inner, True)
    want, want_scale = fp8.quantise_rows(d_both, fp8.E5M2)
    assert torch.equal(rounded.float(), want.float())
    assert torch.equal(scale, want_scale)
    assert torch.allclose(again, inner)


@pytest.mark.parametrize("scales", [None, "row"])
def test_compiles_into_one_graph(scales: fp8.Scales | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(swiglu.feed_forward, fullgraph=True, backend="aot_eager")
    want = value_and_gradients(lambda *v: swiglu.feed_forward(*v, scales), *problem(torch.bfloat16))
    got = value_and_gradients(lambda *v: compiled(*v, scales), *problem(torch.bfloat16))
    for ours, eager in zip(got, want, strict=True):
        assert (ours.float() - eager.float()).norm() <= (0.1 if scales else 0.01) * eager.float().norm()


@pytest.mark.parametrize("use_fp8", [False, True])
def test_shapes_are_known_without_computing(use_fp8: bool) -> None:
    both, d_inner = torch.randn(6, 2 * INNER, dtype=torch.bfloat16), torch.randn(6, INNER, dtype=torch.bfloat16)
    torch.library.opcheck(swiglu.product, (both, use_fp8))
    torch.library.opcheck(swiglu.product_gradient, (both, d_inner, use_fp8))
