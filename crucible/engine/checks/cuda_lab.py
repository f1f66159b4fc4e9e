"""A Lab on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import Checkpoint
from crucible.config import ModelConfig
from crucible.engine.checks.lab import Attend, Lab
from crucible.engine.cuda_runner import CudaRunner
from crucible.kernels.device import CudaDevice
from crucible.kernels.problems import AttentionProblem
from crucible.kernels.table import kernel
from crucible.model.cuda_ops import CudaOps
from crucible.model.validation_ops import OnDevice
from crucible.model.weights import load_weights

MAX_SEQUENCES = 256
"""Requests of the largest batch that a check runs."""
LARGEST_BUDGET = 1024
"""Prompt tokens of its largest step, unless the context is longer."""
ATTENTION_ROWS = 512
"""Rows of a random problem of attention."""


def cuda_lab(
    checkpoint: Checkpoint,
    quant: str,
    context: int,
    *,
    device: Any = None,
    largest_batch: int = MAX_SEQUENCES,
    **switches: Any,
) -> Lab:
    """``switches``: of CudaRunner; ``device``: a CudaDevice, unless given. Raises ConfigError and CheckpointError."""
    device = CudaDevice() if device is None else device
    rows = largest_batch + max(context, LARGEST_BUDGET)
    ops: Any = CudaOps(
        checkpoint.config, device, quant=quant, max_rows=rows, max_sequences=largest_batch, context=context
    )
    weights = load_weights(checkpoint, ops, quant)
    return Lab(
        checkpoint.config,
        weights,
        ops,
        ops.allocate_cache,
        context=context,
        make_runner=partial(CudaRunner, device=device, **switches),
        device="cuda",
        poison=partial(poison, device),
        attend=attention_forms(checkpoint.config, quant, device, context),
        eager={"graphs": False, "prefill_graphs": False},
        replays=count_replays(device),
        largest_batch=largest_batch,
    )


def poison(device: Any, cache: Any) -> None:
    """NaN in every slot, a page at a time."""
    for values in (cache.k, cache.v):
        page = device.upload(np.full(values.shape[1:], np.nan, values.dtype))
        for index in range(len(values)):
            device.copy(page, values[index])


def count_replays(device: Any) -> Callable[[], int]:
    """How often ``device`` has replayed a graph from now on."""
    count, replay = 0, getattr(device, "replay", None)

    def counted(graph: Any) -> None:
        nonlocal count
        count += 1
        if replay is not None:
            replay(graph)

    device.replay = counted
    return lambda: count


def attention_forms(config: ModelConfig, quant: str, device: Any, context: int) -> dict[str, Attend]:
    """Decode (positions shared by a random number of blocks) and prefill (tiles of random size); float32's own.

    The same scratch serves every call, with what the last one left in it.
    """
    config = msgspec.structs.replace(  # little scratch
        config, num_layers=2, vocab_size=16, token_count=16, bos_token_id=None, eos_token_ids=[]
    )
    names = [f"decode_{config.head_dim}", f"prefill_{config.head_dim}"] if quant != "f32" else ["reference_f32_f32"]

    def form(name: str) -> Attend:
        ops = OnDevice(kernel(f"crucible_attention_{name}"), config, device, rows=ATTENTION_ROWS, context=context)

        def attend(problem: AttentionProblem, random: np.random.Generator) -> NDArray[Any]:
            ops.inputs.clear()
            ops.splits = int(random.integers(1, 9))
            return ops.attend(problem, tile_rows=int(random.integers(1, 65)))

        return attend

    return {name: form(name) for name in names}
