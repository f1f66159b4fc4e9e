"""Sharding: which process keeps the optimizer state of which parameter (ZeRO stage 1, arXiv:1910.02054)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from crucible_train.distributed import Workers

State = dict[str, dict[str, Any]]
STEP = "step"
"""AdamW's count of updates."""


class Sharding:
    """Shares ``parameters`` out so that each process owns about as many elements as the others."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], workers: Workers) -> None:
        self._parameters = list(parameters)
        self._workers = workers
        self._owners: dict[str, int] = {}
        loads = [0] * workers.world
        for name, parameter in sorted(parameters, key=lambda item: -item[1].numel()):  # stable: the same everywhere
            owner = loads.index(min(loads))
            self._owners[name] = owner
            loads[owner] += parameter.numel()

    def owns(self, name: str) -> bool:
        """Whether parameter ``name`` is this process's to update."""
        return self._owners[name] == self._workers.rank

    @torch.no_grad()
    def spread(self) -> None:
        """Every process gets the parameters that the others have updated."""
        if self._workers.world == 1:
            return
        pending = [
            dist.broadcast(parameter.detach(), src=self._owners[name], async_op=True)
            for name, parameter in self._parameters
        ]
        for work in pending:
            work.wait()

    def collect(self, state: State, keys: Mapping[str, Sequence[str]]) -> State | None:
        """The state of all parameters as CPU tensors on rank 0, None elsewhere; every process calls it.

        state: that of the owned ones, by parameter name. keys: name → its state's tensors; ``step`` is a scalar, the
        others have the parameter's shape.
        """
        rank = self._workers.rank
        result: State = {}
        for name, parameter in self._parameters:
            owner = self._owners[name]
            values = {}
            for key in keys[name]:
                if owner == 0:
                    tensor = state[name][key] if rank == 0 else None
                elif rank == owner:
                    dist.send(state[name][key].to(parameter.device).contiguous(), dst=0)
                    tensor = None
                else:
                    shape = () if key == STEP else parameter.shape
                    tensor = torch.empty(shape, device=parameter.device) if rank == 0 else None
                    if tensor is not None:
                        dist.recv(tensor, src=owner)
                if tensor is not None:
                    values[key] = tensor.detach().to("cpu", copy=True)
            result[name] = values
        return result if rank == 0 else None
