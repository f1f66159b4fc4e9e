"""Checkpoints as int8, by the kernel that also packs float weights when they are loaded as int8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import INT8, Checkpoint, check_finite, matrices, open_checkpoint, save_checkpoint
from crucible.errors import CheckpointError
from crucible.importers.hf_import import side_files
from crucible.kernels.cpu import linear, runtime
from crucible.model.ops import FloatArray
from crucible.quantized import QuantizedTensor, scale_shape

_DOCUMENTS = ("README.md", "LICENSE*")


def quantize(rows: FloatArray) -> QuantizedTensor:
    """float32 [out, in] as int8, exactly what loading it as int8 computes with."""
    n, k = rows.shape
    blocks, groups = -(-n // linear.LANES), scale_shape(rows.shape)[1]
    w = np.zeros((blocks, k, linear.LANES), np.int8)
    scale = np.zeros((blocks, groups, linear.LANES), np.uint16)
    linear.pack_i8(rows, w, scale, 0, 1)
    values, scales = (packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[:n] for packed in (w, scale))
    return QuantizedTensor(np.ascontiguousarray(values), np.ascontiguousarray(scales))


def quantize_checkpoint(source: str | Path, target: str | Path, *, progress: bool = False) -> Path:
    """Writes the native or Hugging Face directory ``source`` as the native int8 checkpoint ``target``; returns it.

    Embedding, projections and head become int8, other tensors keep their stored type. Tokenizer, chat template,
    README.md and LICENSE files are carried over. Raises CheckpointError or TokenizerError, one line; also for a source
    that holds int8 already.
    """
    directory = Path(source)
    with open_checkpoint(directory) as checkpoint:
        dtypes = checkpoint.dtypes()
        if INT8 in dtypes.values():
            raise CheckpointError(f"{directory}: already int8; quantize the checkpoint that it was made from")
        check_finite(checkpoint)
        runtime.set_threads(None)
        dtypes.update(dict.fromkeys(matrices(checkpoint.config), INT8))
        files = side_files(directory) | _documents(directory)
        tensors = _tensors(checkpoint, dtypes, progress)
        save_checkpoint(target, checkpoint.config, tensors, dtype=dtypes, files=files)
    return Path(target)


def _tensors(
    checkpoint: Checkpoint, dtypes: dict[str, str], progress: bool
) -> Iterator[tuple[str, NDArray[Any] | QuantizedTensor]]:
    from tqdm import tqdm

    for name in tqdm(checkpoint.names(), desc="quantizing", unit="tensor", disable=not progress):
        values = checkpoint.read(name)
        yield name, quantize(values) if dtypes[name] == INT8 else values
        checkpoint.release(name)


def _documents(directory: Path) -> dict[str, bytes]:
    paths = (path for pattern in _DOCUMENTS for path in sorted(directory.glob(pattern)) if path.is_file())
    try:
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory}: cannot be read ({error.strerror or error})") from None
