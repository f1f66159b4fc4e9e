"""Export to the native format: the directory that ``crucible generate`` and ``crucible-serve`` take."""

from __future__ import annotations

from pathlib import Path

from crucible.checkpoint import CONFIG_NAME
from crucible.config.model import serialise_model_config
from crucible.tokenizer import VOCABULARY_FILE
from crucible_train.export_source import TEMPLATE_FILE, open_source, stored_dtype, write_model
from crucible_train.export_target import export_directory


def export_native(
    source: str | Path, target: str | Path, *, dtype: str | None = None, which: str | None = None
) -> Path:
    """Writes ``config.json``, ``model.safetensors``, ``tokenizer.vocab`` (and a chat template) to ``target``.

    source: a run directory (``which``: its best or last checkpoint) or a model directory. dtype: float32, bfloat16 or
    float16, rounded to nearest even; None keeps the checkpoint's (int8 becomes float32). An older export in ``target``
    is replaced whole. Returns ``target``. Raises CrucibleError, one line.
    """
    target = Path(target)
    with open_source(source, which) as opened:
        files = {CONFIG_NAME: serialise_model_config(opened.config)}
        if opened.vocabulary is not None:
            files[VOCABULARY_FILE] = opened.vocabulary.to_bytes()
        if opened.chat_template is not None:
            files[TEMPLATE_FILE] = opened.chat_template.encode()
        with export_directory(target, opened.path) as directory:
            write_model(directory, opened, stored_dtype(opened.checkpoint, dtype), files)
    return target
