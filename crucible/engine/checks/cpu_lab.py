"""A Lab on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from crucible.checkpoint import Checkpoint
from crucible.config import ModelConfig
from crucible.engine.checks.lab import Attend, Lab
from crucible.model.cpu_ops import CpuOps
from crucible.model.validation_ops import Expected
from crucible.model.weights import load_weights


def cpu_lab(checkpoint: Checkpoint, quant: str, context: int, threads: int | None) -> Lab:
    """``threads``: how many compute, unless a run says otherwise. Raises ConfigError and CheckpointError."""
    ops: Any = CpuOps(checkpoint.config, context, threads)
    weights = load_weights(checkpoint, ops, quant)
    return Lab(
        checkpoint.config,
        weights,
        ops,
        ops.allocate_cache,
        context=context,
        threads=threads,
        set_threads=ops.set_threads,
        poison=poison,
        attend={"cpu": attention(checkpoint.config, context)},
    )


def poison(cache: Any) -> None:
    """NaN in every slot."""
    cache.k.fill(np.nan)
    cache.v.fill(np.nan)


def attention(config: ModelConfig, context: int) -> Attend:
    """The CPU's kernel over a cache of the problem's own."""
    ops = Expected(CpuOps(config, context), half=False)
    return lambda problem, random: ops.attend(problem)
