"""Directories that appear complete or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crucible.errors import CheckpointError


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside ``target`` to write into; when the block ends, it becomes ``target``.

    An error inside the block removes it. Raises CheckpointError when ``target`` exists or cannot be written, or when
    the block fails on another file, which is then named.
    """
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: already exists; remove it or choose another name")
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            yield partial
            for file in (*partial.iterdir(), partial):
                _flush(file)
            os.rename(partial, target)
            _flush(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise _refusal(error, target, partial) from None


def _refusal(error: OSError, target: Path, partial: Path) -> CheckpointError:
    """Whose fault it was: a file elsewhere is one that the block read; a full disk names no file."""
    named, reason = error.filename, error.strerror or error
    if isinstance(named, str | os.PathLike):
        path = Path(os.path.abspath(named))
        if path != partial and path not in target.parents and partial not in path.parents:
            return CheckpointError(f"{path}: cannot be read ({reason})")
    return CheckpointError(f"{target}: cannot be written ({reason})")


def _flush(path: Path) -> None:
    """fsync of a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
