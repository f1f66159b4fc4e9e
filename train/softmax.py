"""The pointwise part of the cross-entropy: logits to losses and, in place, to softmax − onehot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crucible_train import fp8, kernels
from crucible_train.norm import precise

IGNORED = -1
"""A target that asks for nothing."""

GRADIENT_SCALE = 2.0**15
"""softmax − onehot lies in [−1, 1]: a power of two below e5m2's largest value needs no search for the maximum."""


def evaluate(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of losses; nothing is written."""
    return maybe_compiled(_evaluate, logits.is_cuda)(logits, targets)  # type: ignore[no-any-return]


def loss_and_gradient(
    logits: Tensor, targets: Tensor, *, in_place: bool, rounded: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum of losses; ``logits`` [n, V] contiguous become softmax − onehot, zero in rows to ignore, if ``in_place``.

    ``rounded``: the second result is GRADIENT_SCALE times the gradient in e5m2 [n, V]. Without ``in_place`` logits are
    undefined afterwards.
    """
    if kernels.usable(logits):
        from crucible_train.softmax_kernel import losses_and_gradient

        small = torch.empty(logits.shape, dtype=fp8.E5M2, device=logits.device) if rounded else None
        losses = losses_and_gradient(logits, targets, in_place=in_place, rounded=small, scale=GRADIENT_SCALE)
        return losses.sum(), small
    return maybe_compiled(FORMS[logits.is_cuda, rounded], logits.is_cuda)(logits, targets)  # type: ignore[no-any-return]


def _evaluate(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(precise(logits), targets.long(), ignore_index=IGNORED, reduction="sum")


def softmax_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of losses; ``logits`` [n, V] become softmax − onehot, zero in rows to ignore. In place, for small chunks."""
    valid = (targets != IGNORED).unsqueeze(1)
    index = targets.long().clamp(min=0).unsqueeze(1)
    x = precise(logits)
    picked = x.gather(1, index)
    top = x.amax(1, keepdim=True)
    x = x.sub_(top).exp_() if x is logits else (x - top).exp_()
    total = x.sum(1, keepdim=True)
    losses = torch.where(valid, total.log() + top - picked, 0.0)
    x.div_(total).scatter_add_(1, index, torch.full_like(total, -1.0)).masked_fill_(~valid, 0.0)
    if x is not logits:
        logits.copy_(x)
    return losses.sum()


def _eager_fp8(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = softmax_gradient(logits, targets)
    return total, (logits.float() * GRADIENT_SCALE).to(fp8.E5M2)


def _eager(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    return softmax_gradient(logits, targets), None


def functional_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of losses and the gradient [n, V] float32, as expressions that torch.compile turns into one kernel."""
    valid = targets != IGNORED
    x = precise(logits)
    top = x.amax(1, keepdim=True)
    shifted = (x - top).exp()
    total = shifted.sum(1, keepdim=True)
    picked = x.gather(1, targets.long().clamp(min=0).unsqueeze(1))
    losses = torch.where(valid.unsqueeze(1), total.log() + top - picked, 0.0)
    hit = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    gradient = torch.where(valid.unsqueeze(1), shifted / total - hit.to(x.dtype), 0.0)
    return losses.sum(), gradient


def _compiled(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    total, gradient = functional_gradient(logits, targets)
    logits.copy_(gradient)
    return total, None


def _compiled_fp8(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total, gradient = functional_gradient(logits, targets)
    logits.copy_(gradient)
    return total, (gradient * GRADIENT_SCALE).to(fp8.E5M2)


@functools.cache
def maybe_compiled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """``function``, compiled where there is a GPU to gain from it; one compilation for each shape."""
    return torch.compile(function, dynamic=False) if compiled else function


FORMS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): _eager,
    (False, True): _eager_fp8,
    (True, False): _compiled,
    (True, True): _compiled_fp8,
}
"""The pointwise part by (compiled, FP8)."""
