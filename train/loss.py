"""The head and its cross-entropy in one operation: the logits of a whole batch never exist.

Rows are taken a chunk at a time; a chunk's logits become its loss and, in place, their own gradient, which two
products turn into the gradients of the hidden states and the head (the idea of Liger Kernel, arXiv:2410.10989).
Memory is bounded by the chunk. The backward pass only scales.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crucible_train.compute import HeadMatmul
from crucible_train.errors import TrainingError
from crucible_train.fp8 import MULTIPLE
from crucible_train.head import HEADS
from crucible_train.norm import precise
from crucible_train.softmax import IGNORED, evaluate

CUDA_CHUNK = 16384
"""1.6 GB of bf16 logits at a vocabulary of 50304: few enough float32 sums of the weight's gradient not to matter."""
CPU_CHUNK = 512


def cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same sum by the plain way, whole logits in memory: hidden [N, d], weight [V, d], targets [N] → [] float32."""
    return F.cross_entropy(precise(F.linear(hidden, weight)), targets.long(), ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int | None = None, precision: HeadMatmul = "bf16"
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of softmax(hidden · weightᵀ), in nats, and the number of targets that count.

    hidden [N, d], weight [V, d], targets [N] of ids or IGNORED; → float32 [], int64 []. Differentiable once in hidden
    and weight. Products have hidden's type, under autocast its; softmax is float32, as is the sum of the weight's
    gradient over chunks. ``chunk``: rows at once, default by device. ``precision``: which products are in FP8
    (crucible_train.head.HEADS); d and V must then be multiples of 16, else TrainingError.
    """
    if precision != "bf16" and (weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE):
        shape = " × ".join(map(str, weight.shape))
        raise TrainingError(f"an fp8 head needs multiples of {MULTIPLE}, got {shape}; use matmul bf16")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    rows = chunk or (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK)
    wants_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    wanted = targets
    if precision == "fp8":
        rows = -(-rows // MULTIPLE) * MULTIPLE
        missing = -hidden.shape[0] % MULTIPLE
        if missing:
            hidden, wanted = F.pad(hidden, (0, 0, 0, missing)), F.pad(targets, (0, missing), value=IGNORED)
    total, _, _ = _operation(hidden, weight, wanted, rows, precision, wants_gradients)
    return total, (targets != IGNORED).sum()


# A custom operation, since torch.compile takes it whole into its graph: tracing the loop over chunks would leave the
# order and the lifetime of the logits to the scheduler. What is pointwise is compiled by itself or a kernel of ours.
@torch.library.custom_op(
    "crucible_train::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, int chunk, str precision, bool gradients)"
    " -> (Tensor, Tensor, Tensor)",
)
def _operation(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, precision: str, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of losses [], gradient of hidden [N, d] in its type and of weight [V, d] in float32 (empty if not asked)."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = HEADS[precision](hidden.detach(), weight.detach())
        d_hidden, d_weight = _empty_gradients(hidden, weight, gradients)
        if not len(hidden):
            d_weight.zero_()
        total = torch.zeros((), dtype=_accumulator(hidden.dtype), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            if gradients:
                total += head.loss(rows, targets[rows], d_hidden[rows], d_weight)
            else:
                total += evaluate(head.logits(rows), targets[rows])
        return total, d_hidden, d_weight


@_operation.register_fake
def _shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, precision: str, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (hidden.new_empty((), dtype=_accumulator(hidden.dtype)), *_empty_gradients(hidden, weight, gradients))


def _empty_gradients(hidden: Tensor, weight: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
    rows, columns = (hidden.shape[0], weight.shape[0]) if wanted else (0, 0)
    width = hidden.shape[1]
    return hidden.new_empty((rows, width)), hidden.new_empty((columns, width), dtype=_accumulator(hidden.dtype))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # else zeros as large as the head are made for outputs that nothing reads
    ctx.weight_dtype = inputs[1].dtype
    ctx.save_for_backward(output[1], output[2])


def _scale(ctx: Any, gradient: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 6
    d_hidden, d_weight = ctx.saved_tensors
    return d_hidden * gradient, (d_weight * gradient).to(ctx.weight_dtype), None, None, None, None


_operation.register_autograd(_scale, setup_context=_save)
