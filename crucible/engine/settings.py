"""Settings: an EngineConfig with everything left open chosen from the model and this machine."""

from __future__ import annotations

from dataclasses import replace

from crucible.config import EngineConfig, ModelConfig
from crucible.config.engine import require_quant
from crucible.config.limits import CPU_CONTEXT
from crucible.config.processors import available_processors
from crucible.errors import ConfigError
from crucible.model.kv import kv_bytes_per_page
from crucible.native.batch import pages_for

CPU_PREFILL_BUDGET = 128
"""Default prompt tokens a step on a CPU: a number of tokens, never a timing, so that results do not depend on speed."""
GPU_PREFILL_BUDGET = 1024
"""The same on a GPU."""


def choose_device(device: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is cuda where CuPy sees a GPU."""
    if device == "auto":
        from crucible.kernels.device import gpu_available

        return "cuda" if gpu_available() else "cpu"
    return device


def resolve_config(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """``config`` with everything left open chosen from the model and this machine. Raises ConfigError.

    context: the model's, on a CPU at most CPU_CONTEXT. kv_pages: enough for ``max_batch`` requests of a full context,
    or what ``kv_memory`` holds. prefill_budget: CPU_PREFILL_BUDGET or GPU_PREFILL_BUDGET, the context without
    chunked_prefill, 1 with ``prefill`` serial; those two are then as by default. threads: the processors this process
    may use.
    """
    if config.context is not None and config.context > model.context_length:
        raise ConfigError(f"context {config.context} is above the model's {model.context_length}")
    cuda = config.device == "cuda"
    context = config.context or (model.context_length if cuda else min(model.context_length, CPU_CONTEXT))
    kv_pages = config.kv_pages
    if config.kv_memory is not None:
        page_bytes = kv_bytes_per_page(model, kv_bytes(config))
        kv_pages = config.kv_memory // page_bytes
        if kv_pages < 1:
            raise ConfigError(f"kv_memory of {config.kv_memory} bytes holds no page of {page_bytes} bytes")
    require_quant(config.quant, "cuda" if cuda else "cpu")
    budget = config.prefill_budget or (GPU_PREFILL_BUDGET if cuda else CPU_PREFILL_BUDGET)
    if config.prefill == "serial":
        budget = 1
    elif not config.chunked_prefill:
        budget = context
    return replace(
        config,
        device="cuda" if cuda else "cpu",
        context=context,
        kv_pages=kv_pages or config.max_batch * pages_for(context),
        kv_memory=None,
        prefill="auto",
        chunked_prefill=True,
        batched_prefill=config.batched_prefill and config.chunked_prefill,
        prefill_budget=budget,
        threads=config.threads or available_processors(),
    )


def kv_bytes(config: EngineConfig) -> int:
    """Bytes of an element of K and V."""
    return 2 if kv_dtype(config) == "float16" else 4


def kv_dtype(config: EngineConfig) -> str:
    """Type of K and V: float16 on a GPU, but for the reference path of float32 weights."""
    return "float16" if config.device == "cuda" and config.quant != "f32" else "float32"


def sizes(config: EngineConfig) -> tuple[int, int, int]:
    """(context, kv_pages, prefill_budget) of a resolved configuration."""
    if config.context is None or config.kv_pages is None or config.prefill_budget is None:
        raise ConfigError("context, kv_pages and prefill_budget are open; resolve the configuration first")
    return config.context, config.kv_pages, config.prefill_budget
