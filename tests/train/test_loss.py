"""linear_cross_entropy is the plain cross-entropy, in loss and both gradients, whatever the chunk."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from crucible_train.compute import HeadMatmul
from crucible_train.head import Head
from crucible_train.loss import cross_entropy_reference, linear_cross_entropy
from crucible_train.softmax import functional_gradient, softmax_gradient

ROWS, WIDTH, VOCABULARY = 37, 16, 96


pytestmark = pytest.mark.usefixtures("one_thread")


def problem(dtype: torch.dtype = torch.float32, ignored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) / 2).to(dtype)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    if ignored:
        targets[::5] = -1
    return hidden, weight, targets


def gradients(
    function: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = function(hidden, weight)
    (total * 0.5).backward()  # the gradient that arrives is not 1
    assert hidden.grad is not None
    assert weight.grad is not None
    return total.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 36, 37, 38, 1000, None])
def test_equals_the_plain_loss_in_float32(chunk: int | None, ignored: bool) -> None:
    hidden, weight, targets = problem(ignored=ignored)
    got = gradients(lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk)[0], hidden, weight)
    want = gradients(lambda h, w: cross_entropy_reference(h, w, targets), hidden, weight)
    for ours, plain in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        assert torch.allclose(ours, plain, rtol=2e-5, atol=2e-6 * plain.abs().max().item())
    assert linear_cross_entropy(hidden, weight, targets, chunk=chunk)[1].item() == (targets >= 0).sum().item()
    assert not got[1][targets < 0].any()


@pytest.mark.parametrize("chunk", [5, 64])
def test_gradients_are_derivatives(chunk: int) -> None:
    hidden, weight, targets = problem(torch.float64)
    inputs = (hidden[:9, :6].clone().requires_grad_(), weight[:8, :6].clone().requires_grad_())
    targets = targets[:9].clamp(max=7)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk)[0], inputs)


@pytest.mark.parametrize("chunk", [7, None])
def test_bf16_stays_within_its_rounding_of_the_exact_loss(chunk: int | None) -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    got = gradients(lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk)[0], hidden, weight)
    want = gradients(lambda h, w: cross_entropy_reference(h, w, targets), hidden.double(), weight.double())
    plain = gradients(lambda h, w: cross_entropy_reference(h, w, targets), hidden, weight)
    assert got[0].item() == pytest.approx(want[0].item(), rel=2**-8)
    for ours, exact, usual in zip(got[1:], want[1:], plain[1:], strict=True):
        error, usual_error = ((g.double() - exact).norm() / exact.norm() for g in (ours, usual))
        assert error <= 2**-7
        assert error <= 1.5 * usual_error


def test_autocast_decides_the_type_and_float32_weights_get_float32_gradients() -> None:
    hidden, weight, targets = problem()
    exact = gradients(lambda h, w: cross_entropy_reference(h, w, targets), hidden, weight)

    def under_autocast(h: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(h, w, targets, chunk=10)[0]

    got = gradients(under_autocast, hidden, weight)
    assert [g.dtype for g in got] == [torch.float32] * 3
    for ours, want in zip(got, exact, strict=True):
        assert 0 < (ours - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("precision", ["fp8", "fp8-two"])
def test_fp8_products_stay_near(precision: HeadMatmul) -> None:
    hidden, weight, targets = problem()
    got = gradients(lambda h, w: linear_cross_entropy(h, w, targets, chunk=10, precision=precision)[0], hidden, weight)
    want = gradients(lambda h, w: cross_entropy_reference(h, w, targets), hidden, weight)
    assert got[0].item() == pytest.approx(want[0].item(), rel=0.02)
    for ours, exact in zip(got[1:], want[1:], strict=True):
        assert 0 < (ours - exact).norm() <= 0.12 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_only_the_loss_is_computed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = problem(dtype)
    want = linear_cross_entropy(hidden.clone().requires_grad_(), weight, targets, chunk=8)[0]
    monkeypatch.setattr(Head, "loss", None)
    with torch.no_grad():
        got, count = linear_cross_entropy(hidden, weight, targets, chunk=8)
    assert not got.requires_grad
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    assert count.item() == (targets >= 0).sum().item()


def test_only_ignored_rows_give_zero() -> None:
    hidden, weight, _ = problem()
    targets = torch.full((ROWS,), -1)
    total, d_hidden, d_weight = gradients(lambda h, w: linear_cross_entropy(h, w, targets)[0], hidden, weight)
    assert total == 0
    assert not d_hidden.any()
    assert not d_weight.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_targets_may_be_int32_or_int64(dtype: torch.dtype) -> None:
    hidden, weight, targets = problem()
    totals = [linear_cross_entropy(hidden.requires_grad_(), weight, t)[0] for t in (targets, targets.to(dtype))]
    assert totals[0] == totals[1]


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = problem(ignored=False)
    total, d_hidden, _ = gradients(lambda h, w: linear_cross_entropy(h, w, targets)[0], hidden * 1000, weight)
    assert math.isfinite(total.item())
    assert d_hidden.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_forms_of_the_pointwise_part_agree(dtype: torch.dtype) -> None:
    _, _, targets = problem()
    logits = (4 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(2))).to(dtype)
    want_total, want = functional_gradient(logits, targets)
    total = softmax_gradient(logits, targets)
    assert torch.allclose(total, want_total)
    assert torch.allclose(logits, want.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
