"""The Triton kernels give what the plain operations give: on a GPU, elsewhere through Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton")

from crucible_train import fp8, rotary, rotary_kernel, softmax_kernel, swiglu, swiglu_kernel, transpose_kernel  # noqa: E402
from crucible_train.softmax import functional_gradient  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
TYPES = [torch.bfloat16, torch.float16]
pytestmark = pytest.mark.gpu if CUDA else []


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """Equal FP8 values, but for neighbours; the interpreter halves what rounds up to a power of two (Triton 3.6)."""
    ours, exact = got.float(), want.float()
    near = (ours - exact).abs() <= 0.26 * exact.abs() + 2**-8  # subnormals, too
    assert (near if CUDA else near | (2 * ours == exact)).all()
    assert (ours == exact).float().mean() > 0.8


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [48, 64, 300])
@pytest.mark.parametrize("in_place", [False, True])
def test_softmax(columns: int, dtype: torch.dtype, in_place: bool) -> None:
    logits = 3 * random(7, columns, dtype=dtype)
    targets = torch.arange(7, device=DEVICE) * (columns // 7)
    targets[2] = -1
    total, gradient = functional_gradient(logits, targets)
    before = logits.clone()
    rounded = torch.empty(logits.shape, dtype=fp8.E5M2, device=DEVICE)
    losses = softmax_kernel.losses_and_gradient(
        logits, targets, in_place=in_place, rounded=rounded, scale=2.0**15, block=64, warps=4
    )
    assert losses[2] == 0
    assert losses.sum().item() == pytest.approx(total.item(), rel=1e-5)
    assert_rounded(rounded, (gradient * 2.0**15).to(fp8.E5M2))
    if in_place:
        assert torch.allclose(logits.float(), gradient, rtol=2**-7, atol=1e-6)
        assert not logits[2].any()
    else:
        assert torch.equal(logits, before)


def test_softmax_of_large_logits_and_int32_targets() -> None:
    logits = torch.full((2, 100), -6e4, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 70] = 6e4
    targets = torch.tensor([70, 3], device=DEVICE, dtype=torch.int32)
    wide = float(logits[0, 70] - logits[0, 3].float())
    losses = softmax_kernel.losses_and_gradient(logits, targets, in_place=True, block=64, warps=4)
    rounding = 4 * 6e4 * 2.0**-24  # of numbers as large as these, whose difference a loss is
    assert losses.tolist() == pytest.approx([0.0, wide], rel=1e-3, abs=rounding)
    assert logits[1, 70] == 1
    assert logits[1, 3] == -1
    assert logits.abs().sum() == 2


@pytest.mark.parametrize("shape", [(32, 32), (37, 50), (1, 70)])
def test_transpose(shape: tuple[int, int]) -> None:
    bits = torch.arange(shape[0] * shape[1], device=DEVICE).remainder(251).to(torch.uint8).view(shape)
    for kind in (fp8.E4M3, fp8.E5M2):
        got = transpose_kernel.transpose(bits.view(kind), 32, 16, 4)
        assert got.dtype == kind
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.uint8), bits.t())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inner", [32, 48])
@pytest.mark.parametrize("use_fp8", [False, True])
def test_swiglu(inner: int, dtype: torch.dtype, use_fp8: bool) -> None:
    both, d_inner = random(5, 2 * inner, dtype=dtype), random(5, inner, dtype=dtype, seed=1)
    result, scales = (torch.zeros_like(x) for x in swiglu.product(both, use_fp8))
    swiglu_kernel.forward(both, result, scales)
    exact, _ = swiglu.product(both.float().cpu(), False)
    exact = exact.to(DEVICE)
    if use_fp8:
        want, want_scales = fp8.quantise_rows(exact, fp8.E4M3)
        assert torch.allclose(scales, want_scales)
        assert_rounded(result, want)
    else:
        assert torch.allclose(result.float(), exact, rtol=2**-7, atol=1e-5)

    got = [torch.zeros_like(x) for x in swiglu.product_gradient(both, d_inner, use_fp8)]
    swiglu_kernel.backward(both, d_inner, *got, use_fp8)
    d_both, rounded, scales, again = got
    d_exact = swiglu.product_gradient(both.float().cpu(), d_inner.float().cpu(), False)[0].to(DEVICE)
    assert torch.allclose(d_both.float(), d_exact, rtol=2**-7, atol=1e-5)
    assert torch.allclose(again.float(), exact, rtol=2**-7, atol=1e-5)
    if use_fp8:
        want, want_scales = fp8.quantise_rows(d_exact, fp8.E5M2)
        assert torch.allclose(scales, want_scales)
        assert_rounded(rounded, want)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("use_fp8", [False, True])
def test_rotary(dtype: torch.dtype, use_fp8: bool) -> None:
    batch, length, heads, kv_heads, half = 2, 5, 3, 2, 8
    angles = 3 * random(length, half, dtype=torch.float32, seed=1)
    cos, sin = angles.cos(), angles.sin()
    qkv = random(batch * length, (heads + 2 * kv_heads) * 2 * half, dtype=dtype)
    exact = rotary.rotary_forward(qkv.float().cpu(), cos.cpu(), sin.cpu(), batch, heads, kv_heads)
    got = [torch.zeros_like(x, dtype=dtype, device=DEVICE) for x in exact]
    rotary_kernel.forward(qkv, cos, sin, got[0], got[1])
    for ours, plain in zip(got, exact, strict=True):
        assert torch.allclose(ours.float(), plain.to(DEVICE), rtol=2**-7, atol=1e-5)

    # As attention leaves them: heads before tokens in memory.
    sizes = (heads, kv_heads, kv_heads)
    parts = [random(batch, n, length, 2 * half, dtype=dtype, seed=n + 2).transpose(1, 2) for n in sizes]
    plain_parts = [part.float().cpu() for part in parts]
    d_exact = rotary.rotary_backward(*plain_parts, cos.cpu(), sin.cpu(), False)[0].to(DEVICE)
    results = [torch.zeros_like(x) for x in rotary.rotary_backward(*parts, cos, sin, use_fp8)]
    rotary_kernel.backward(*parts, cos, sin, *results, use_fp8)
    d_qkv, rounded, scales = results
    assert torch.allclose(d_qkv.float(), d_exact, rtol=2**-7, atol=1e-5)
    if use_fp8:
        want, want_scales = fp8.quantise_rows(d_exact, fp8.E5M2)
        assert torch.allclose(scales, want_scales)
        assert_rounded(rounded, want)
