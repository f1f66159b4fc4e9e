"""Importers: other formats to native checkpoints."""

from __future__ import annotations

from pathlib import Path

from crucible.errors import CheckpointError

__all__ = ["import_model"]


def import_model(source: str | Path, target: str | Path, *, progress: bool = False) -> Path:
    """Converts a Hugging Face directory or a GGUF file to the native checkpoint ``target``, which it returns.

    Raises CheckpointError or TokenizerError naming file and fault.
    """
    path = Path(source)
    if path.is_dir():
        from crucible.importers.hf_import import import_hf

        return import_hf(path, target, progress=progress)
    if path.is_file():
        from crucible.importers.gguf import import_gguf

        return import_gguf(path, target, progress=progress)
    raise CheckpointError(f"{path}: no such Hugging Face directory or GGUF file")
