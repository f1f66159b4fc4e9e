"""Where an export goes: a file or directory that appears complete or not at all, in place of an older export."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crucible.directory import new_directory
from crucible.errors import CheckpointError
from crucible_train.errors import TrainingError

EXPORT_FILES = frozenset({
    "config.json", "model.safetensors", "tokenizer.vocab", "tokenizer.json", "tokenizer_config.json",
    "generation_config.json", "chat_template.jinja",
})  # fmt: skip
"""What the exporters write; a directory that holds anything else is not theirs to replace."""


@contextmanager
def export_directory(target: Path, source: Path) -> Iterator[Path]:
    """A temporary directory beside ``target``; when the block ends it becomes ``target``, replacing an older export.

    An error inside the block leaves ``target`` as it was. Raises TrainingError when ``target`` is ``source`` (what is
    exported) or holds files that are not an export's, CheckpointError when it cannot be written.
    """
    target = Path(os.path.abspath(target))
    if not os.path.lexists(target):
        with new_directory(target) as directory:
            yield directory
        return
    check_replaceable(target, source)
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
    old = fresh.with_suffix(".old")
    try:
        with new_directory(fresh) as directory:
            yield directory
        # Two renames: between them there is no target, but never a mixture of old and new files.
        os.rename(target, old)
        os.rename(fresh, target)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(fresh), str(target))) from None
    except OSError as error:
        raise TrainingError(f"{target}: cannot be replaced ({error.strerror or error})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            os.rename(old, target)


def check_replaceable(target: Path, source: Path) -> None:
    """Raises TrainingError unless ``target`` is an empty directory or an older export other than ``source``."""
    if not target.is_dir() or target.is_symlink():
        raise TrainingError(f"{target}: exists and is no directory; remove it or choose another name")
    if target.resolve() == source.resolve():
        raise TrainingError(f"{target}: is what is exported; choose another directory")
    for name in sorted(os.listdir(target)):
        if name not in EXPORT_FILES:
            raise TrainingError(f"{target}: holds {name!r}, so it is not an older export; choose another directory")


@contextmanager
def export_file(target: Path) -> Iterator[Path]:
    """The name of a temporary file beside ``target``; when the block ends, it replaces ``target``.

    An error inside the block removes it and leaves ``target`` as it was. Raises TrainingError where it cannot be
    written.
    """
    target = Path(os.path.abspath(target))
    if target.is_dir():
        raise TrainingError(f"{target}: is a directory; give the name of the file to write")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, target)
    except OSError as error:
        raise TrainingError(f"{target}: cannot be written ({error.strerror or error})") from None
    finally:
        with suppress(OSError):
            partial.unlink()
