"""What a worker does with a block: take its documents out, encode them and divide them between the splits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from crucible.errors import TokenizerError
from crucible.tokenizer import Tokenizer, without_surrogates
from crucible_train.errors import TrainingError
from crucible_train.shards import token_dtype
from crucible_train.sources import DOCUMENT_BYTES, SEPARATOR_TEXT, Block, separator_end

SPLIT_RULE = "val when the first 8 bytes of sha256(text), big-endian, are below val_fraction * 2**64"


@dataclass(frozen=True)
class EncodeJob:
    """All that a worker has to know; hashable, so that it can keep the tokenizer from block to block."""

    vocabulary: Path
    separator_id: int
    text_field: str
    val_fraction: float


@dataclass(frozen=True)
class Encoded:
    """The documents of one block, in order.

    ``train``, ``val``: ids with a separator after each document, uint16 or uint32. ``lengths``: ids of each document
    with its separator, int64 [n]; ``in_val``: bool [n]; ``text_bytes``: int64 [n].
    """

    train: NDArray[Any]
    val: NDArray[Any]
    lengths: NDArray[np.int64]
    in_val: NDArray[np.bool_]
    text_bytes: NDArray[np.int64]
    empty: int
    cut: int

    def first(self, count: int) -> Encoded:
        """The same with only the first ``count`` documents."""
        lengths, in_val = self.lengths[:count], self.in_val[:count]
        train, val = int(lengths[~in_val].sum()), int(lengths[in_val].sum())
        return Encoded(
            self.train[:train], self.val[:val], lengths, in_val, self.text_bytes[:count], self.empty, self.cut
        )


def is_validation(text: bytes, val_fraction: float) -> bool:
    """Whether a document belongs to the validation split: SPLIT_RULE, so wherever it stands in the input."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < int(val_fraction * 2**64)


def encode_block(job: EncodeJob, block: Block) -> Encoded:
    """Raises TrainingError, with file and line, for what cannot be read or encoded."""
    tokenizer = _tokenizer(job.vocabulary)
    dtype = token_dtype(tokenizer.token_count)
    separator = np.array([job.separator_id], dtype)
    parts: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
    lengths: list[int] = []
    in_val: list[bool] = []
    text_bytes: list[int] = []
    empty, cut = 0, int(block.cut)
    for text, line in documents(block, job.text_field):
        if not text:
            empty += 1
            continue
        pieces = _pieces(text)
        cut += len(pieces) - 1
        for piece in pieces:
            data = without_surrogates(piece).encode()
            try:
                ids = tokenizer.encode_array(piece)
            except TokenizerError as error:
                raise TrainingError(f"{block.source}:{line}: {error}") from None
            val = is_validation(data, job.val_fraction)
            parts[val].extend((ids.astype(dtype), separator))
            lengths.append(len(ids) + 1)
            in_val.append(val)
            text_bytes.append(len(data))
    joined = [np.concatenate(part) if part else np.empty(0, dtype) for part in parts]
    numbers = np.array(lengths, np.int64), np.array(in_val, np.bool_), np.array(text_bytes, np.int64)
    return Encoded(joined[0], joined[1], *numbers, empty, cut)


@lru_cache(maxsize=1)
def _tokenizer(vocabulary: Path) -> Tokenizer:
    return Tokenizer.from_file(vocabulary)


def _pieces(text: str) -> list[str]:
    """A text in parts of at most DOCUMENT_BYTES characters, each but the last ended by a line end where possible."""
    pieces = []
    while len(text) > DOCUMENT_BYTES:
        end = text.rfind("\n", 0, DOCUMENT_BYTES) + 1 or DOCUMENT_BYTES
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]


def documents(block: Block, text_field: str = "text") -> Iterator[tuple[str, int]]:
    """The texts of a block, each with its line (or row) number. Raises TrainingError naming file and line."""
    if not isinstance(block.data, bytes):
        yield from ((text or "", block.line + number) for number, text in enumerate(block.data))
    elif block.format == "txt":
        yield from _text_documents(block, block.data)
    else:
        yield from _json_documents(block, block.data, text_field)


def _text_documents(block: Block, data: bytes) -> Iterator[tuple[str, int]]:
    start, line = 0, block.line
    for end, after in _document_ends(data):
        try:
            yield data[start:end].decode(), line
        except UnicodeDecodeError as error:
            line += data.count(b"\n", start, start + error.start)
            byte, position = data[start + error.start], block.offset + start + error.start
            what = f"byte 0x{byte:02x} at offset {position} of the text"
            raise TrainingError(f"{block.source}:{line}: {what} is not UTF-8; convert the file") from None
        line += data.count(b"\n", start, after)
        start = after


def _document_ends(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each document ends, and the separator behind it."""
    after, start = 0, -1
    while (start := data.find(SEPARATOR_TEXT, start + 1)) >= 0:
        if end := separator_end(data, start):
            yield start, end
            after = end
    if after < len(data):
        yield len(data), len(data)


def _json_documents(block: Block, data: bytes, text_field: str) -> Iterator[tuple[str, int]]:
    try:
        row: Any = msgspec.defstruct("Row", [("text", str)], rename={"text": text_field})
        decoder = msgspec.json.Decoder(row)
    except ValueError:  # a name with a quote or backslash in it
        decoder = None
    for number, line in enumerate(data.split(b"\n"), block.line):
        if not line.strip():
            continue
        if decoder is None:
            yield _json_text(line, text_field, f"{block.source}:{number}"), number
            continue
        try:
            yield decoder.decode(line).text, number
        except (msgspec.DecodeError, UnicodeDecodeError):
            yield _json_text(line, text_field, f"{block.source}:{number}"), number


def _json_text(line: bytes, text_field: str, where: str) -> str:
    """What the strict decoder refused: half surrogate pairs are let through, all else is told."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TrainingError(f"{where}: byte {error.start} of the line is not UTF-8; convert the file") from None
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict) or text_field not in value:
        raise TrainingError(f"{where}: no field {text_field!r} in this line (--text-field names another)")
    text = value[text_field]
    if not isinstance(text, str):
        raise TrainingError(f"{where}: the field {text_field!r} is not a string")
    return text
