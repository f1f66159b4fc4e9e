"""Small things done with files."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crucible_train.errors import TrainingError


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, flushes it to the disk and renames it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def locked(directory: Path, busy: str) -> Iterator[int]:
    """Makes ``directory`` and holds its lock, a file descriptor: whoever inherits it holds the lock too.

    The lock ends with the last process that holds it, however that dies. Raises TrainingError, with the words of
    ``busy``, when it is taken, and when the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise TrainingError(f"{directory}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"{directory}: {busy}") from None
        yield handle
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
