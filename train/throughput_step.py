"""One variant in training and the data it is trained on, for crucible_train.throughput."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crucible.config.model import ModelConfig
from crucible_train.errors import TrainingError
from crucible_train.throughput_variants import Variant
from crucible_train.transformer import Transformer

LEARNING_RATE = 6e-4
WARMUP = 50
"""Steps; without them what a large model's loss is after some tens of steps is chance."""
WEIGHT_DECAY = 0.1
CLIP = 1.0
FOLLOW = 0.75
"""How often the next token of the data is the one that its predecessor determines."""
POOL = 16
"""Batches of data, taken in turn."""


Data = list[tuple[Tensor, Tensor]]
"""Tokens and targets int64 [batch, context] of each batch."""


@dataclass(frozen=True)
class Plan:
    """What is run: ``rounds`` times ``settle`` untimed and ``steps`` timed steps of batch · context tokens.

    After ``limit_seconds`` no variant starts another round: what is measured by then is reported.
    """

    batch: int
    context: int
    steps: int = 10
    rounds: int = 5
    settle: int = 2
    seed: int = 0
    limit_seconds: float = 86400.0

    def __post_init__(self) -> None:
        for name in ("batch", "context", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be at least 1, got {getattr(self, name)}")


class Subject:
    """One variant in training: its model, optimizer and what was measured."""

    def __init__(self, name: str, variant: Variant, config: ModelConfig, plan: Plan, device: torch.device) -> None:
        self.name, self.variant, self.device = name, variant, device
        torch.manual_seed(plan.seed)
        self.model = Transformer(config, variant.compute).to(device)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
        self.run: Callable[[Tensor, Tensor], Tensor] = self.model
        if variant.mode != "none":
            mode = None if variant.mode == "default" else variant.mode
            self.run = torch.compile(self.model, mode=mode, fullgraph=True, dynamic=False)
        self.steps = 0
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.first_seconds = 0.0
        self.peak_bytes = 0

    def step(self, data: Data) -> None:
        """One optimizer step on batch number ``steps``. Waits for nothing."""
        tokens, targets = data[self.steps % len(data)]
        if self.variant.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.run(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (self.steps + 1) / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach().clone())
        self.steps += 1

    def round(self, data: Data, plan: Plan) -> None:
        """Untimed steps, then timed ones. The first round starts with the compilation."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()  # what the last variant left
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - self.state_bytes()
        began = time.perf_counter()
        for _ in range(plan.settle):
            self.step(data)
            if self.steps == 1:
                wait(self.device)
                self.first_seconds = time.perf_counter() - began
        wait(self.device)
        began = time.perf_counter()
        for _ in range(plan.steps):
            self.step(data)
        wait(self.device)
        self.seconds.append(time.perf_counter() - began)
        if cuda:
            peak = torch.cuda.max_memory_allocated() - others
            # The first round also holds what compiling and tuning took.
            self.peak_bytes = peak if len(self.seconds) <= 2 else max(self.peak_bytes, peak)

    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state: what is held between steps."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


def learnable_data(vocab_size: int, plan: Plan, device: torch.device) -> Data:
    """Up to POOL batches: a token is mostly the fixed successor of the one before, else a skewed draw."""
    generator = torch.Generator().manual_seed(plan.seed)
    count = min(POOL, plan.rounds * (plan.steps + plan.settle))
    shape = (plan.context + 1, count, plan.batch)
    successor = torch.randperm(vocab_size, generator=generator)
    drawn = (vocab_size * torch.rand(shape, generator=generator).pow(4)).long().clamp(max=vocab_size - 1)
    follows = torch.rand(shape, generator=generator) < FOLLOW
    for place in range(1, plan.context + 1):
        drawn[place] = torch.where(follows[place], successor[drawn[place - 1]], drawn[place])
    windows = drawn.permute(1, 2, 0)
    return [(w[:, :-1].contiguous().to(device), w[:, 1:].contiguous().to(device)) for w in windows]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
