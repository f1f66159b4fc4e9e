"""The products of the head: logits, and the gradients of hidden states and weight from softmax − onehot."""

from __future__ import annotations

import torch
from torch import Tensor

from crucible_train import fp8, kernels
from crucible_train.softmax import GRADIENT_SCALE, loss_and_gradient, maybe_compiled


class Head:
    """Products in one type. The gradient of the weight is summed in ``d_weight``'s."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        """hidden [N, d] in the type of the products, weight [V, d]."""
        self.hidden, self.weight = hidden, weight.to(hidden.dtype)

    def logits(self, rows: slice) -> Tensor:
        """[n, V] of some rows of hidden."""
        return torch.mm(self.hidden[rows], self.weight.t())

    def loss(self, rows: slice, targets: Tensor, d_hidden: Tensor, d_weight: Tensor) -> Tensor:
        """Sum of losses of the rows. Writes d_hidden [n, d], and d_weight [V, d]: for the first rows its value, for
        others its sum with what it holds."""
        logits = self.logits(rows)
        loss, _ = loss_and_gradient(logits, targets, in_place=True, rounded=False)
        torch.mm(logits, self.weight, out=d_hidden)
        self._add(d_weight, torch.mm(logits.t(), self.hidden[rows]), rows)
        return loss

    @staticmethod
    def _add(total: Tensor, product: Tensor, rows: slice) -> None:
        """A chunk's product is summed in float32 and rounded once, as the plain path does for the whole batch; adding
        chunks in float32 then costs no accuracy, however many there are."""
        if rows.start == 0:
            total.copy_(product)
        else:
            total.add_(product)


class Fp8Head(Head):
    """The products of logits and of hidden's gradient in FP8. The gradient of the weight stays in the plain type."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.dtype = hidden, hidden.dtype
        self.weight, self.columns, self.scale = maybe_compiled(_quantise_weight, weight.is_cuda)(weight)
        self.hidden8, self.hidden_scale = maybe_compiled(_quantise, hidden.is_cuda)(hidden)
        self.gradient_scale = torch.full((), 1 / GRADIENT_SCALE, device=weight.device)

    def logits(self, rows: slice) -> Tensor:
        return fp8.scaled_matmul(
            self.hidden8[rows], self.weight.t(), self.hidden_scale, self.scale, self.dtype, fast=True
        )

    def loss(self, rows: slice, targets: Tensor, d_hidden: Tensor, d_weight: Tensor) -> Tensor:
        logits = self.logits(rows)
        loss, rounded = loss_and_gradient(logits, targets, in_place=True, rounded=True)
        self._hidden_gradient(rounded, d_hidden)
        self._add(d_weight, torch.mm(logits.t(), self.hidden[rows]), rows)
        return loss

    def _hidden_gradient(self, rounded: Tensor | None, out: Tensor) -> None:
        if rounded is None:
            raise RuntimeError("the FP8 head needs the rounded gradient")
        out.copy_(fp8.scaled_matmul(rounded, self.columns, self.gradient_scale, self.scale, self.dtype))


class WholeFp8Head(Fp8Head):
    """All three products in FP8: the gradient of the logits exists in e5m2 alone, and once more transposed.

    For 65536 rows of 50304 that is 6.6 GB of copies (1.5 ms at 4.3 TB/s) for half of a product of 5.1 TFLOP (3 of 6
    ms) and 3.3 GB less to write. Rounding errors of single logits' gradients are independent, so in the weight's
    gradient, a sum over all rows, they average out. Rows of a chunk are a multiple of fp8.MULTIPLE.
    """

    def loss(self, rows: slice, targets: Tensor, d_hidden: Tensor, d_weight: Tensor) -> Tensor:
        loss, rounded = loss_and_gradient(self.logits(rows), targets, in_place=False, rounded=True)
        self._hidden_gradient(rounded, d_hidden)
        columns = _transposed(self.hidden8[rows]).t()
        product = fp8.scaled_matmul(
            _transposed(rounded), columns, self.gradient_scale, self.hidden_scale, self.dtype
        )  # fmt: skip
        self._add(d_weight, product, rows)
        return loss


HEADS: dict[str, type[Head]] = {"bf16": Head, "fp8-two": Fp8Head, "fp8": WholeFp8Head}
"""By precision (compute.HeadMatmul)."""


def _transposed(x: Tensor) -> Tensor:
    if x.is_cuda and kernels.has_triton():
        from crucible_train.transpose_kernel import transpose

        return transpose(x)
    return x.t().contiguous()


def _quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The head in e4m3 [V, d], once more with contiguous columns, and its scale."""
    w8, scale = fp8.quantise(weight, fp8.E4M3)
    return w8, fp8.column_major(w8), scale


def _quantise(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return fp8.quantise(hidden, fp8.E4M3)
