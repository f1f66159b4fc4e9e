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
def new_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory beside ``target`` to write into; when the block ends, it becomes ``target``.

    An error inside the block removes it. An existing ``target`` is refused, or with ``overwrite`` replaced by two
    renames. Raises CheckpointError when ``target`` exists or cannot be written.
    """
    target = Path(os.path.abspath(target))
    if not overwrite and os.path.lexists(target):
        raise CheckpointError(f"{target}: already exists; remove it or choose another name")
    token = secrets.token_hex(4)
    partial = target.parent / f".{target.name}.{token}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            yield partial
            for file in (*partial.iterdir(), partial):
                _flush(file)
            _replace(partial, target, token, overwrite)
            _flush(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: cannot be written ({error.strerror or error})") from None


def _replace(partial: Path, target: Path, token: str, overwrite: bool) -> None:
    """rename(2) puts a directory over an empty one only, so an old one steps aside first."""
    old = target.parent / f".{target.name}.{token}.old"
    if overwrite and os.path.lexists(target):
        os.rename(target, old)
    try:
        os.rename(partial, target)
    except OSError:
        if os.path.lexists(old):
            os.rename(old, target)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """fsync of a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
