"""Token shards: the files between ``prepare`` and training.

A directory holds ``train-00000.tokens`` …, ``val-00000.tokens`` …, ``tokenizer.vocab`` and ``manifest.json``, which is
written last: a directory without it is not finished. A shard is a header of 256 bytes and the ids, little-endian
uint16 or uint32, in the order of the documents, each document followed by the separator. A split's shards are one
stream cut every ``shard_tokens`` ids, so a document may go on in the next shard.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible_train.errors import TrainingError
from crucible_train.manifest import SPLITS, read_manifest

MAGIC = b"CRUSHARD"
SHARD_VERSION = 1
HEADER_BYTES = 256
# magic; version, bytes an id, shard number, ids in the vocabulary, separator id, zero; tokens, documents; sha256 of the
# vocabulary. Zeros follow, and the CRC-32 of all that in the last four bytes.
_HEADER = struct.Struct("<8s6IQQ32s")
UINT16_IDS = 1 << 16


def token_dtype(id_count: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 (little-endian) that holds every id below ``id_count``."""
    return np.dtype("<u2") if id_count <= UINT16_IDS else np.dtype("<u4")


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself. ``document_count``: documents that end in it; ``id_count``: 1 + the highest id."""

    dtype: np.dtype[Any]
    index: int
    id_count: int
    separator_id: int
    token_count: int
    document_count: int
    vocabulary_sha256: bytes

    def to_bytes(self) -> bytes:
        """The 256 bytes at the start of the file."""
        numbers = (SHARD_VERSION, self.dtype.itemsize, self.index, self.id_count, self.separator_id, 0)
        packed = _HEADER.pack(MAGIC, *numbers, self.token_count, self.document_count, self.vocabulary_sha256)
        content = packed.ljust(HEADER_BYTES - 4, b"\0")
        return content + struct.pack("<I", zlib.crc32(content))

    @classmethod
    def from_bytes(cls, data: bytes, name: str | Path) -> ShardHeader:
        """The inverse. Raises TrainingError, beginning with ``name``, for anything else than a header."""
        if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
            raise TrainingError(f"{name}: not a token shard (no header); prepare the data again")
        if zlib.crc32(data[: HEADER_BYTES - 4]) != struct.unpack_from("<I", data, HEADER_BYTES - 4)[0]:
            raise TrainingError(f"{name}: the shard's header is damaged (checksum); prepare the data again")
        _, version, width, index, ids, separator, _, tokens, documents, digest = _HEADER.unpack_from(data)
        if version != SHARD_VERSION or width not in (2, 4):
            raise TrainingError(
                f"{name}: shard version {version}, {width} bytes an id; this Crucible reads {SHARD_VERSION}"
            )
        return cls(np.dtype(f"<u{width}"), index, ids, separator, tokens, documents, digest)


@dataclass(frozen=True)
class Shard:
    """An open shard: ``tokens`` is the memory-mapped, read-only uint16 or uint32 [token_count]."""

    path: Path
    header: ShardHeader
    tokens: NDArray[Any]


def open_shard(path: str | Path) -> Shard:
    """Maps one shard. Raises TrainingError when it is missing, damaged, cut short or longer than its header says."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            header = ShardHeader.from_bytes(file.read(HEADER_BYTES), path)
        found, rest = divmod(path.stat().st_size - HEADER_BYTES, header.dtype.itemsize)
        if found != header.token_count or rest:
            raise TrainingError(
                f"{path}: the header says {header.token_count} tokens, the file holds {found}; copy it again"
            )
        if not found:
            return Shard(path, header, np.empty(0, header.dtype))
        return Shard(path, header, np.memmap(path, header.dtype, "r", HEADER_BYTES, (found,)))
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror}") from None


class TokenDataset:
    """The ids of ``split`` ("train" or "val") across its shards, memory-mapped; safe to share between threads.

    ``token_count``, ``document_count``; ``id_count``: 1 + the highest id of the vocabulary; ``vocab_size``: that padded
    to a multiple of 64; ``separator_id``; ``bytes_per_token``: text bytes per id, separators counted as ids, so that
    bits per byte = nats per token / ln 2 / bytes_per_token. Raises TrainingError when the directory is not finished or
    a shard is not the one that the manifest describes.
    """

    def __init__(self, directory: str | Path, split: str) -> None:
        if split not in SPLITS:
            raise TrainingError(f"split {split!r}: must be {' or '.join(SPLITS)}")
        self.directory = Path(directory)
        self.split = split
        self.manifest = manifest = read_manifest(directory)
        info = manifest.splits.get(split)
        if info is None:
            raise TrainingError(f"{directory}: the manifest has no split {split!r}; prepare the data again")
        self.id_count = manifest.token_count
        self.vocab_size = manifest.vocab_size
        self.separator_id = manifest.separator_id
        self.token_count = info.tokens
        self.document_count = info.documents
        self.bytes_per_token = info.bytes / max(info.tokens, 1)
        self._shards = [open_shard(self.directory / shard.file) for shard in info.shards]
        for shard, described in zip(self._shards, info.shards, strict=True):
            self._check(shard, described.tokens)
        sizes = [len(shard.tokens) for shard in self._shards]
        if sum(sizes) != self.token_count:
            raise TrainingError(f"{directory}: the {split} shards hold {sum(sizes)} tokens, not {self.token_count}")
        self._starts = np.cumsum([0, *sizes])

    def _check(self, shard: Shard, tokens: int) -> None:
        header = shard.header
        if header.vocabulary_sha256.hex() != self.manifest.settings.vocabulary_sha256:
            raise TrainingError(f"{shard.path}: made with another vocabulary than {self.directory} says")
        if header.token_count != tokens or header.id_count != self.id_count:
            raise TrainingError(f"{shard.path}: not the shard that the manifest describes; prepare the data again")

    def require(self, context: int) -> None:
        """Raises TrainingError when not even one window of ``context`` inputs with their targets is there."""
        if self.token_count < context + 1:
            raise TrainingError(
                f"{self.directory}: the {self.split} split has {self.token_count} tokens; a context of {context} needs "
                f"at least {context + 1}: prepare more text or shorten the context"
            )

    def gather(self, offsets: NDArray[np.integer[Any]], length: int) -> NDArray[np.int32]:
        """``length`` ids from each of ``offsets``: int32 [n, length] (uint32 ids are below 2^31 by the format).

        Raises TrainingError when a window leaves the split.
        """
        offsets = np.asarray(offsets, np.int64)
        if length < 1 or (len(offsets) and (offsets.min() < 0 or offsets.max() + length > self.token_count)):
            raise TrainingError(
                f"windows of {length} tokens at {offsets.tolist()[:8]} leave the {self.token_count} tokens"
            )
        out = np.empty((len(offsets), length), np.int32)
        first = np.searchsorted(self._starts, offsets, "right") - 1
        last = np.searchsorted(self._starts, offsets + (length - 1), "right") - 1
        for number in np.unique(first[first == last]):
            rows = np.flatnonzero((first == number) & (last == number))
            windows = np.lib.stride_tricks.sliding_window_view(self._shards[number].tokens, length)
            out[rows] = windows[offsets[rows] - self._starts[number]]
        for row in np.flatnonzero(first != last):
            out[row] = self.read(int(offsets[row]), length)
        return out

    def read(self, offset: int, length: int) -> NDArray[Any]:
        """The ids [offset, offset + length), cut at the end of the split: uint16 or uint32, a copy."""
        parts = []
        number = max(int(np.searchsorted(self._starts, offset, "right")) - 1, 0)
        end = min(offset + length, self.token_count)
        while offset < end:
            start = int(self._starts[number])
            part = self._shards[number].tokens[offset - start : end - start]
            parts.append(np.asarray(part))
            offset += len(part)
            number += 1
        return np.concatenate(parts) if parts else np.empty(0, np.dtype(self.manifest.dtype))

    def all(self) -> NDArray[Any]:
        """Every id of the split: uint16 or uint32, a copy."""
        return self.read(0, self.token_count)
