"""The runner of a GPU engine: weights, scratch and graphs first, KV pages from what memory is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crucible.checkpoint import Checkpoint
from crucible.config import EngineConfig
from crucible.engine.cuda_runner import CudaRunner
from crucible.engine.graphs import PREFILL_GRAPHS
from crucible.engine.settings import kv_bytes, resolve_config, sizes
from crucible.errors import ConfigError
from crucible.kernels.device import CudaDevice
from crucible.model.cuda_ops import CudaOps
from crucible.model.kv import kv_bytes_per_page
from crucible.model.weights import load_weights

MARGIN = 512 * 2**20
"""Bytes of device memory left alone: graphs, the driver's own, other programs' fluctuations."""
GRAPH_BYTES = 2**20
"""Room for a captured graph; the largest seen was a third of it."""
PREFIX_SHARE = 4
"""By default pages for this many times the running requests: what is beyond them holds prefixes."""


def build_runner(
    checkpoint: Checkpoint, config: EngineConfig, report: Callable[[str], None]
) -> tuple[CudaRunner, EngineConfig]:
    """A runner over the weights of ``checkpoint``, and the configuration with what was left open chosen.

    Raises ConfigError when the model does not fit, saying how much is missing.
    """
    model = checkpoint.config
    device = CudaDevice(overlap=config.overlap, say=report)
    chosen = resolve_config(config, model)
    context, kv_pages, prefill_budget = sizes(chosen)
    max_rows = chosen.max_batch + prefill_budget
    report("loading weights")
    ops: Any = CudaOps(
        model,
        device,
        quant=chosen.quant,
        max_rows=max_rows,
        max_sequences=chosen.max_batch,
        context=context,
        gemm=chosen.gemm,
        decode_gemm=chosen.decode_gemm,
        attn=chosen.attn,
        prefill_attn=chosen.prefill_attn,
    )
    weights = load_weights(checkpoint, ops, chosen.quant)
    page_bytes = kv_bytes_per_page(model, kv_bytes(chosen))
    free, total = device.memory()
    graphs = chosen.max_batch * chosen.batch_graph + PREFILL_GRAPHS * chosen.prefill_graph
    fit = max(0, free - MARGIN - GRAPH_BYTES * graphs) // page_bytes
    if config.kv_pages is None and config.kv_memory is None:
        kv_pages = min(fit, PREFIX_SHARE * kv_pages)
    if not 1 <= kv_pages <= fit:
        raise ConfigError(
            f"{kv_pages} KV pages of {page_bytes} bytes do not fit: {free} of {total} bytes are free on {device.name}, "
            f"which is {fit} pages after a margin; lower kv_memory, context or max_batch"
        )
    runner = CudaRunner(
        weights,
        ops,
        ops.allocate_cache(kv_pages),
        device=device,
        max_rows=max_rows,
        max_sequences=chosen.max_batch,
        context=context,
        token_count=model.token_count,
        graphs=chosen.batch_graph,
        prefill_graphs=chosen.prefill_graph,
        device_argmax=chosen.device_argmax,
        device_top_k=chosen.device_topk,
    )
    return runner, replace(chosen, kv_pages=kv_pages)
