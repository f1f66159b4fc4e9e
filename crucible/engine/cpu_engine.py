"""The runner of a CPU engine: Numba kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crucible.checkpoint import Checkpoint
from crucible.config import EngineConfig
from crucible.engine.model_runner import ModelRunner
from crucible.engine.settings import resolve_config, sizes
from crucible.model.cpu_ops import CpuOps
from crucible.model.weights import load_weights


def build_runner(
    checkpoint: Checkpoint, config: EngineConfig, report: Callable[[str], None]
) -> tuple[ModelRunner, EngineConfig]:
    """A runner over the weights of ``checkpoint``, and the configuration with what was left open chosen."""
    model, threads = checkpoint.config, config.threads
    config = resolve_config(config, model)
    context, kv_pages, prefill_budget = sizes(config)
    report("loading weights")
    ops: Any = CpuOps(model, context, threads)  # Any: an Ops reads only matrices that it packed itself
    weights = load_weights(checkpoint, ops, config.quant)
    runner = ModelRunner(
        weights,
        ops,
        ops.allocate_cache(kv_pages),
        max_rows=config.max_batch + prefill_budget,
        max_sequences=config.max_batch,
        context=context,
        token_count=model.token_count,
    )
    return runner, replace(config, threads=ops.threads)
