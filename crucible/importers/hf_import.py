"""Hugging Face Llama directories to native checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import Checkpoint, check_finite, open_checkpoint, save_checkpoint
from crucible.errors import CheckpointError, TokenizerError
from crucible.quantized import QuantizedTensor

_CARRIED = ("tokenizer.vocab", "chat_template.jinja", "tokenizer_config.json")


def import_hf(source: str | Path, target: str | Path, *, progress: bool = False) -> Path:
    """Converts the directory ``source`` (it may be native too) to the native checkpoint ``target``, which it returns.

    Weights keep their stored type. ``tokenizer.json`` becomes ``tokenizer.vocab``; the chat template is carried over.
    Raises CheckpointError or TokenizerError naming file and fault.
    """
    directory = Path(source)
    with open_checkpoint(directory) as checkpoint:
        check_finite(checkpoint)
        files = side_files(directory)
        tensors = _tensors(checkpoint, progress)
        save_checkpoint(target, checkpoint.config, tensors, dtype=checkpoint.dtypes(), files=files)
    return Path(target)


def _tensors(checkpoint: Checkpoint, progress: bool) -> Iterator[tuple[str, NDArray[np.float32] | QuantizedTensor]]:
    from tqdm import tqdm

    for name in tqdm(checkpoint.names(), desc="converting", unit="tensor", disable=not progress):
        yield name, checkpoint.read_quantized(name) or checkpoint.read(name)
        checkpoint.release(name)


def side_files(directory: Path) -> dict[str, bytes]:
    """The text side of a model directory as a native one holds it: tokenizer.vocab and the chat template, if any.

    Raises CheckpointError or TokenizerError naming the file.
    """
    files: dict[str, bytes] = {}
    try:
        for name in _CARRIED:
            if (directory / name).is_file():
                files[name] = (directory / name).read_bytes()
        tokenizer = directory / "tokenizer.json"
        if "tokenizer.vocab" not in files and tokenizer.is_file():
            from crucible.vocabulary import Vocabulary

            try:
                files["tokenizer.vocab"] = Vocabulary.from_tokenizer_json(tokenizer.read_bytes()).to_bytes()
            except TokenizerError as error:
                raise TokenizerError(f"{tokenizer}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory}: cannot be read ({error.strerror or error})") from None
    return files
