"""Trainer: one update of the weights, on one process or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from crucible_train.distributed import Workers
from crucible_train.optimizer import Optimizer
from crucible_train.run_config import RunConfig
from crucible_train.schedule import Schedule
from crucible_train.tensors import matrix_rows
from crucible_train.transformer import Transformer

MicroBatch = tuple[Tensor, Tensor]


class Trainer:
    """Gradients of a model over micro-batches and processes, clipping, and the optimizer's update.

    Micro-batches are full windows of the same number of targets, so the sum of losses over all of them, divided by a
    constant, is the mean over the tokens of the global batch, and so is the gradient.
    """

    def __init__(self, model: Transformer, config: RunConfig, workers: Workers, dtype: torch.dtype) -> None:
        self.model, self.workers = model, workers
        self._clip = config.clip
        self._dtype = dtype
        self.schedule = Schedule(
            kind=config.schedule,
            peak=config.peak_lr,
            length=config.schedule_length,
            warmup=config.warmup,
            min_ratio=config.min_lr_ratio,
            decay_fraction=config.decay_fraction,
        )
        parameters = list(model.named_parameters())
        self._parameters = [parameter for _, parameter in parameters]
        self.optimizer = Optimizer(
            parameters,
            workers=workers,
            muon=matrix_rows(model) if config.optimizer == "muon" else {},
            betas=config.betas,
            weight_decay=config.weight_decay,
            sharded=config.zero1,
        )
        # A compiled function beside the model, not a compiled module around it: parameters keep their names.
        compiled = workers.device.type == "cuda" if config.compile is None else config.compile
        self._function: Callable[..., Tensor] = torch.compile(model.loss) if compiled else model.loss
        self._sum_of_losses: nn.Module = _SumOfLosses(model, self._function)
        if workers.world > 1:
            self._sum_of_losses = nn.parallel.DistributedDataParallel(
                self._sum_of_losses,
                device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )

    def update(self, step: int, batches: Sequence[MicroBatch], stop: bool = False) -> Tensor:
        """Update number ``step`` (from 1). Returns device values [3]: mean loss before it, gradient norm, stop.

        The loss is of the global batch. ``stop`` becomes nonzero on all processes when it is given on one. Nothing
        here waits for the device.
        """
        targets = sum(target.numel() for _, target in batches)
        total = torch.zeros((), device=self.workers.device)
        for number, (tokens, wanted) in enumerate(batches, 1):
            with self._sync(number == len(batches)), self.autocast():
                loss = self._sum_of_losses(tokens, wanted) / targets
            with self._sync(number == len(batches)):
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.optimizer.step(self.schedule.rate(step))
        self.optimizer.zero_grad()
        shared = torch.stack((total, torch.full_like(total, float(stop))))
        shared = self.workers.sum(shared) / self.workers.world
        return torch.stack((shared[0], norm, shared[1]))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Summed loss of one batch, for evaluation."""
        with self.autocast():
            return self._function(tokens, targets, "sum")

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [1, n] → logits [1, n, vocab_size]."""
        with self.autocast():
            return self.model.logits(tokens)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.workers.device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        """Only the last micro-batch's backward pass exchanges gradients."""
        ddp = self._sum_of_losses
        if last or not isinstance(ddp, nn.parallel.DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[Any] = ddp.no_sync()
        return context


class _SumOfLosses(nn.Module):
    """A module whose call is the loss, as DistributedDataParallel needs it."""

    def __init__(self, model: Transformer, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._function(tokens, targets, "sum")
