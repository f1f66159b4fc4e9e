"""Muon: momentum whose update is orthogonalised, for matrices inside a network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a·x + b·x³ + c·x⁵, which pushes singular values of 0 … 1 to about 0.7 … 1.2 in five rounds."""


def orthogonalise(updates: Tensor, rounds: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to ``updates`` [n, rows, columns], roughly; on a GPU in bfloat16.

    Newton–Schulz iteration of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/): stable in bfloat16
    because only the rough size of the singular values matters. CPUs without bfloat16 arithmetic take ten times as long
    with it.
    """
    a, b, c = COEFFICIENTS
    x = updates.bfloat16() if updates.is_cuda else updates.float()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay.

    The update is scaled by 0.2 · √max(rows, columns), which gives it the size of AdamW's, so that one learning rate
    and weight decay serve both (arXiv:2502.16982). Matrices of one shape are orthogonalised together.
    splits: id of a parameter → row counts of the matrices that are fused in it; each is orthogonalised by itself.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        splits: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._splits = dict(splits or {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Takes no closure."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            self._step(group)

    def _step(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum: Tensor = state["momentum"]
            momentum.lerp_(parameter.grad, 1 - group["momentum"])
            update = torch.lerp(parameter.grad, momentum, group["momentum"])  # Nesterov: one step further
            rows = list(self._splits.get(id(parameter), (parameter.size(0),)))
            for target, part in zip(parameter.split(rows), update.split(rows), strict=True):
                by_shape[part.shape].append((target, part))
        for shape, pairs in by_shape.items():
            directions = orthogonalise(torch.stack([part for _, part in pairs]))
            scale = -group["lr"] * 0.2 * max(shape) ** 0.5
            targets = [target for target, _ in pairs]
            if group["weight_decay"]:
                torch._foreach_mul_(targets, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(targets, list(directions.to(targets[0].dtype).unbind()), alpha=scale)
