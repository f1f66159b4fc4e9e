"""Optimizer: fused AdamW, and Muon for hidden matrices; whole, or sharded over processes (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from crucible_train.distributed import Workers
from crucible_train.muon import Muon
from crucible_train.sharding import STEP, Sharding, State

EPSILON = 1e-8
STATE_OF_ADAMW = (STEP, "exp_avg", "exp_avg_sq")
STATE_OF_MUON = ("momentum",)

Named = list[tuple[str, nn.Parameter]]


class Optimizer:
    """The optimizers of a model as one: AdamW, with Muon beside it when asked for.

    Weight decay touches matrices only, never norms, biases or other vectors. With ``sharded``, each process keeps the
    state of its share of the parameters, updates those and sends them to the others.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        workers: Workers,
        muon: Mapping[str, tuple[int, ...]],
        betas: tuple[float, float],
        weight_decay: float,
        sharded: bool = False,
    ) -> None:
        """muon: the parameters that Muon takes, with the rows of the matrices fused in each (tensors.matrix_rows)."""
        self._named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._muon = frozenset(muon)
        self._sharding = Sharding(self._named, workers) if sharded and workers.world > 1 else None
        own = [item for item in self._named if self._sharding is None or self._sharding.owns(item[0])]
        rest = [item for item in own if item[0] not in self._muon]
        hidden = [item for item in own if item[0] in self._muon]
        decayed = [item for item in rest if item[1].ndim >= 2]
        plain = [item for item in rest if item[1].ndim < 2]
        self._optimizers: list[tuple[torch.optim.Optimizer, Named]] = []
        if rest:
            groups = [_group(decayed, weight_decay), _group(plain, 0.0)]
            adamw = torch.optim.AdamW(
                [group for group in groups if group["params"]], betas=betas, eps=EPSILON, fused=True
            )
            self._optimizers.append((adamw, decayed + plain))
        if hidden:
            splits = {id(parameter): muon[name] for name, parameter in hidden}
            self._optimizers.append((Muon([_group(hidden, weight_decay)], splits=splits), hidden))

    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``."""
        for optimizer, _ in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if self._sharding is not None:
            self._sharding.spread()

    def zero_grad(self) -> None:
        for _, parameter in self._named:
            parameter.grad = None

    def state(self) -> State | None:
        """State by parameter name as CPU tensors: what load() takes, sharded or not. Complete on rank 0; with
        sharding every process has to call it, and the others get None.
        """
        own: State = {}
        for optimizer, items in self._optimizers:
            for name, parameter in items:
                own[name] = dict(optimizer.state[parameter])
        if self._sharding is None:
            return {name: {key: value.detach().to("cpu", copy=True) for key, value in values.items()}
                    for name, values in own.items()}  # fmt: skip
        keys = {name: STATE_OF_MUON if name in self._muon else STATE_OF_ADAMW for name, _ in self._named}
        return self._sharding.collect(own, keys)

    def load(self, saved: State) -> None:
        """Takes what state() gave. Raises KeyError when a parameter is missing there."""
        for optimizer, items in self._optimizers:
            state = {index: dict(saved[name]) for index, (name, _) in enumerate(items)}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _group(items: Named, decay: float) -> dict[str, Any]:
    return {"params": [parameter for _, parameter in items], "weight_decay": decay, "lr": 0.0}
