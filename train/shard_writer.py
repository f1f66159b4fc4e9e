"""Writing one split's shards: append, and go on after a crash from a length that is known to be on the disk."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crucible_train.errors import TrainingError
from crucible_train.files import file_sha256
from crucible_train.manifest import ShardInfo
from crucible_train.shards import HEADER_BYTES, ShardHeader, open_shard, token_dtype


class ShardWriter:
    """Appends ids to ``SPLIT-00000.tokens`` …, each of exactly ``shard_tokens`` ids but the last.

    A shard grows under a hidden name and gets its own when it is full, or by ``finish``. ``written``: so many ids lie
    there already and are kept, all behind them is dropped; TrainingError when they are not there.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        *,
        id_count: int,
        separator_id: int,
        vocabulary_sha256: bytes,
        shard_tokens: int,
        written: int = 0,
    ) -> None:
        self.dtype: np.dtype[Any] = token_dtype(id_count)
        self.written = written
        self._directory = directory
        self._split = split
        self._id_count = id_count
        self._separator_id = separator_id
        self._vocabulary_sha256 = vocabulary_sha256
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._recover()

    def append(self, ids: NDArray[Any]) -> None:
        """Adds ids: uint [n], all below ``id_count``."""
        ids = np.ascontiguousarray(ids, self.dtype)
        while len(ids):
            index, used = divmod(self.written, self._shard_tokens)
            if self._file is None:
                self._file = self._hidden(index).open("wb")
                self._file.write(bytes(HEADER_BYTES))
            part = ids[: self._shard_tokens - used]
            self._file.write(part.data)
            self.written += len(part)
            ids = ids[len(part) :]
            if used + len(part) == self._shard_tokens:
                self._close(index, self._shard_tokens)

    def sync(self) -> None:
        """Brings every id appended so far to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> list[ShardInfo]:
        """Closes the last shard and describes all."""
        index, used = divmod(self.written, self._shard_tokens)
        if self._file is not None:
            self._close(index, used)
        shards = [open_shard(self._path(number)) for number in range(index + bool(used))]
        return [
            ShardInfo(shard.path.name, shard.header.token_count, shard.header.document_count, file_sha256(shard.path))
            for shard in shards
        ]

    def abandon(self) -> None:
        """Lets go of the open file; what was synced can be gone on from."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close(self, index: int, tokens: int) -> None:
        assert self._file is not None
        self._file.flush()
        hidden = self._hidden(index)
        documents = self._count_documents(hidden)
        header = ShardHeader(
            self.dtype, index, self._id_count, self._separator_id, tokens, documents, self._vocabulary_sha256
        )
        self._file.seek(0)
        self._file.write(header.to_bytes())
        self.sync()
        self.abandon()
        os.replace(hidden, self._path(index))

    def _count_documents(self, path: Path) -> int:
        documents = 0
        with path.open("rb") as file:
            file.seek(HEADER_BYTES)
            while len(ids := np.fromfile(file, self.dtype, 1 << 20)):
                documents += int(np.count_nonzero(ids == self._separator_id))
        return documents

    def _recover(self) -> None:
        index, used = divmod(self.written, self._shard_tokens)
        for number in range(index):
            if not self._path(number).is_file():
                raise self._lost(number)
        pattern = re.compile(rf"\.?{self._split}-(\d+)\.tokens(\.part)?")
        for path in self._directory.iterdir():
            match = pattern.fullmatch(path.name)
            if match and (int(match[1]) > index or (int(match[1]) == index and not used)):
                path.unlink()
        if not used:
            return
        hidden = self._hidden(index)
        if self._path(index).is_file():  # it was finished after the state that is gone on from
            os.replace(self._path(index), hidden)
        size = HEADER_BYTES + used * self.dtype.itemsize
        if not hidden.is_file() or hidden.stat().st_size < size:
            raise self._lost(index)
        os.truncate(hidden, size)
        self._file = hidden.open("r+b")
        self._file.seek(size)

    def _lost(self, number: int) -> TrainingError:
        return TrainingError(f"{self._path(number)}: a part of the unfinished data is gone; begin again with --restart")

    def _path(self, index: int) -> Path:
        return self._directory / f"{self._split}-{index:05d}.tokens"

    def _hidden(self, index: int) -> Path:
        return self._directory / f".{self._split}-{index:05d}.tokens.part"
