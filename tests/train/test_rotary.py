"""The one-operation projection and rotation is the plain one, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crucible_train import fp8, rotary
from crucible_train.positions import rotate

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 32, 3, 1, 16
Parts = tuple[Tensor, ...]


pytestmark = pytest.mark.usefixtures("one_thread")


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """x, weight and rope's tables."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH, generator=generator, dtype=torch.float64)
    angles = torch.randn(LENGTH, HEAD_DIM // 2, generator=generator, dtype=torch.float64)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return x.to(dtype), (weight / 4).to(dtype), (angles.cos().to(table), angles.sin().to(table))


def plain(x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int) -> Parts:
    parts = F.linear(x, weight).unflatten(-1, (-1, HEAD_DIM)).split((heads, kv_heads, kv_heads), dim=2)
    return rotate(parts[0], *rope, False), rotate(parts[1], *rope, False), parts[2]


def one_operation(scales: fp8.Scales | None = None) -> Callable[..., Parts]:
    return lambda *values: rotary.project(*values, scales)


def values_and_gradients(function: Callable[..., Parts], x: Tensor, weight: Tensor, rope: Parts) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    parts = function(x, weight, rope, HEADS, KV_HEADS)
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(part.shape, generator=generator).to(part.dtype) for part in parts]
    return [*(part.detach() for part in parts), *torch.autograd.grad(parts, (x, weight), upstream)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_the_plain_operations(dtype: torch.dtype, bound: float) -> None:
    got = values_and_gradients(one_operation(), *problem(dtype))
    x, weight, (cos, sin) = problem(dtype)
    want = values_and_gradients(plain, x.double(), weight.double(), (cos.double(), sin.double()))
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == exact.shape
        assert (ours.double() - exact).norm() <= bound * exact.norm()


def test_autocast_decides_the_type_and_float32_weights_get_float32_gradients() -> None:
    def under_autocast(*values: Tensor) -> Parts:
        with torch.autocast("cpu", torch.bfloat16):
            return rotary.project(*values)  # type: ignore[arg-type]

    got = values_and_gradients(under_autocast, *problem(torch.float32))
    assert [g.dtype for g in got] == [torch.bfloat16] * 3 + [torch.float32] * 2


@pytest.mark.parametrize("scales", ["row", "row-after"])
def test_fp8_products_stay_near(scales: fp8.Scales) -> None:
    got = values_and_gradients(one_operation(scales), *problem(torch.float32))
    want = values_and_gradients(plain, *problem(torch.float32))
    for ours, exact in zip(got[:4], want[:4], strict=True):
        assert 0.005 * exact.norm() < (ours - exact).norm() <= 0.1 * exact.norm()
    assert torch.allclose(got[4], want[4], atol=1e-4)  # the weight's gradient is no FP8 product


def test_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(one_operation("row"), fullgraph=True, backend="aot_eager")
    want = values_and_gradients(one_operation("row"), *problem(torch.bfloat16))
    got = values_and_gradients(compiled, *problem(torch.bfloat16))
    for ours, eager in zip(got, want, strict=True):
        assert (ours.float() - eager.float()).norm() <= 0.1 * eager.float().norm()


@pytest.mark.parametrize("use_fp8", [False, True])
def test_shapes_are_known_without_computing(use_fp8: bool) -> None:
    _, _, (cos, sin) = problem(torch.bfloat16)
    q, k, v = (torch.randn(BATCH, n, LENGTH, HEAD_DIM).transpose(1, 2) for n in (HEADS, KV_HEADS, KV_HEADS))
    qkv = torch.randn(BATCH * LENGTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    torch.library.opcheck(rotary.rotary_forward, (qkv, cos, sin, BATCH, HEADS, KV_HEADS))
    torch.library.opcheck(rotary.rotary_backward, (q, k, v, cos, sin, use_fp8))
