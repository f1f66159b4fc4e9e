"""Vocabulary: the tokens of a byte-level BPE tokenizer and the compact file ``tokenizer.vocab`` that holds them.

The file, little-endian: magic; u32 version, flags, token count, merge count, special count, added count, length of
the pattern's name; the name; u16 length of each token by id (0: no such id); the tokens' bytes; u32 pairs of merges;
u32 ids of special, then added tokens; with the flag PREFIX a u32 count and u32 ids of the prefix; u32 CRC-32 of all
that comes before.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crucible.errors import TokenizerError
from crucible.native.bpe import PATTERNS

MAGIC = b"CRUVOCAB"
VERSION = 1
HEADER = struct.Struct("<7I")
EXPLICIT_MERGES, WHOLE_PIECES, NFC, PREFIX = 1, 2, 4, 8
MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 0xFFFF


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens by id and how text becomes them.

    ``pattern`` names the pre-tokenizer (gpt2, smollm, llama3, qwen2). ``merges`` is uint32 [n, 2], pairs of ids by
    priority, or ``None``: any two neighbours whose bytes make an ordinary token merge, lowest id first (tiktoken's
    rule). ``whole_pieces``: a piece of text that is a token becomes it whatever the merges say. ``special`` ids come
    out of text only when asked for; ``added`` ids always do, found as literal text before anything else; all others
    are ordinary. ``nfc``: text is brought to Unicode's composed form first. ``prefix_ids`` go before every prompt that
    is plain text (a beginning-of-text token, where the model was trained with one); chat templates write theirs.
    """

    pattern: str
    tokens: Sequence[bytes]
    special: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()
    merges: NDArray[np.uint32] | None = None
    whole_pieces: bool = True
    nfc: bool = False
    prefix_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise TokenizerError(f"unknown pre-tokenizer {self.pattern!r}; known are {', '.join(PATTERNS)}")
        if not self.tokens or not self.tokens[-1]:
            raise TokenizerError("a vocabulary must end with a token")
        if len(self.tokens) >= MAX_TOKENS:
            raise TokenizerError(f"{len(self.tokens)} tokens; at most {MAX_TOKENS - 1} are supported")
        for token_id in sorted(self.special | self.added):
            if not 0 <= token_id < len(self.tokens) or not self.tokens[token_id]:
                raise TokenizerError(f"special token id {token_id} has no token")
        for token_id in self.prefix_ids:
            if not 0 <= token_id < len(self.tokens) or not self.tokens[token_id]:
                raise TokenizerError(f"prefix token id {token_id} has no token")
        if self.special & self.added:
            raise TokenizerError(f"token {min(self.special & self.added)} is both special and added")

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens by their text."""
        return self._texts(self.special)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Added tokens that are not special, by their text."""
        return self._texts(self.added)

    def _texts(self, ids: frozenset[int]) -> dict[str, int]:
        texts: dict[str, int] = {}
        for token_id in sorted(ids):
            try:
                text = self.tokens[token_id].decode("utf-8")
            except UnicodeDecodeError:
                raise TokenizerError(f"special token {token_id} is not UTF-8 text") from None
            if text in texts:
                raise TokenizerError(f"special tokens {texts[text]} and {token_id} have the same text {text!r}")
            texts[text] = token_id
        return texts

    @classmethod
    def from_tiktoken(
        cls, text: str | bytes, pattern: str = "gpt2", special: Mapping[str, int] | None = None
    ) -> Vocabulary:
        """A tiktoken rank file (a line each: base64 of the token, its id) plus special tokens.

        Raises TokenizerError naming the line that is malformed or repeats an id.
        """
        tokens: dict[int, bytes] = {}
        data = text.encode() if isinstance(text, str) else text
        for number, line in enumerate(data.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                encoded, rank = line.split()
                token, token_id = base64.b64decode(encoded, validate=True), int(rank)
            except (ValueError, binascii.Error):
                raise TokenizerError(f"line {number} of the rank file is not 'BASE64 ID'") from None
            if not token or not 0 <= token_id < MAX_TOKENS or token_id in tokens:
                raise TokenizerError(f"line {number} of the rank file: empty token or id {token_id} twice or too large")
            tokens[token_id] = token
        special = special or {}
        for name, token_id in special.items():
            if not name or not 0 <= token_id < MAX_TOKENS or token_id in tokens:
                raise TokenizerError(f"special token {name!r} is empty, or its id {token_id} is taken or too large")
            tokens[token_id] = utf8(name)
        return cls(pattern, by_id(tokens), special=frozenset(special.values()))

    @classmethod
    def from_tokenizer_json(cls, data: bytes) -> Vocabulary:
        """A Hugging Face ``tokenizer.json`` of a byte-level BPE tokenizer.

        What its post-processor puts before a text becomes ``prefix_ids``. Raises TokenizerError naming the part that
        cannot be represented.
        """
        from crucible.foreign_vocabulary import read_tokenizer_json

        return read_tokenizer_json(data)

    @classmethod
    def from_gguf_fields(
        cls,
        tokens: Sequence[str],
        token_types: Sequence[int],
        merges: Sequence[str],
        pre: str,
        prefix_ids: Sequence[int] = (),
    ) -> Vocabulary:
        """The fields ``tokenizer.ggml.tokens``, ``.token_type``, ``.merges`` and ``.pre`` of a GGUF file.

        Raises TokenizerError naming the field that cannot be represented.
        """
        from crucible.foreign_vocabulary import read_gguf_fields

        return read_gguf_fields(tokens, token_types, merges, pre, prefix_ids)

    def to_bytes(self) -> bytes:
        """The content of the file. Raises TokenizerError when a token is longer than 65535 bytes."""
        lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        if lengths.max() > MAX_TOKEN_BYTES:
            raise TokenizerError(f"token {lengths.argmax()} has {lengths.max()} bytes; at most {MAX_TOKEN_BYTES}")
        merges = np.empty((0, 2), np.uint32) if self.merges is None else self.merges
        flags = EXPLICIT_MERGES * (self.merges is not None) | WHOLE_PIECES * self.whole_pieces | NFC * self.nfc
        flags |= PREFIX * bool(self.prefix_ids)
        name = self.pattern.encode("ascii")
        counts = (len(self.tokens), len(merges), len(self.special), len(self.added), len(name))
        marked = [*sorted(self.special), *sorted(self.added)]
        parts = [MAGIC, HEADER.pack(VERSION, flags, *counts), name, lengths.astype("<u2").tobytes(), *self.tokens]
        parts += [merges.astype("<u4").tobytes(), np.array(marked, "<u4").tobytes()]
        if self.prefix_ids:
            parts.append(np.array([len(self.prefix_ids), *self.prefix_ids], "<u4").tobytes())
        content = b"".join(parts)
        return content + struct.pack("<I", zlib.crc32(content))

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "tokenizer.vocab") -> Vocabulary:
        """The inverse of ``to_bytes``. Raises TokenizerError, beginning with ``name``, for any fault in the file."""
        try:
            return cls._parse(data)
        except TokenizerError as error:
            raise TokenizerError(f"{name}: {error}") from None

    @classmethod
    def _parse(cls, data: bytes) -> Vocabulary:
        if data[: len(MAGIC)] != MAGIC:
            raise TokenizerError("not a Crucible vocabulary file (wrong first bytes)")
        reader = _Reader(data, len(MAGIC))
        version, flags, tokens, merges, special, added, name_length = HEADER.unpack(reader.take(HEADER.size, "header"))
        if version != VERSION:
            raise TokenizerError(f"format version {version}; this Crucible reads version {VERSION}")
        if flags & ~(EXPLICIT_MERGES | WHOLE_PIECES | NFC | PREFIX):
            raise TokenizerError(f"unknown flags {flags:#x}")
        name = reader.take(name_length, "pre-tokenizer name")
        lengths = np.frombuffer(reader.take(2 * tokens, "token lengths"), "<u2")
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        blob = reader.take(ends[-1] if ends else 0, "token bytes")
        pairs = np.frombuffer(reader.take(8 * merges, "merges"), "<u4").reshape(-1, 2).astype(np.uint32)
        specials = np.frombuffer(reader.take(4 * special, "special tokens"), "<u4").tolist()
        addeds = np.frombuffer(reader.take(4 * added, "added tokens"), "<u4").tolist()
        (prefix,) = struct.unpack("<I", reader.take(4, "prefix count")) if flags & PREFIX else (0,)
        prefix_ids = np.frombuffer(reader.take(4 * prefix, "prefix tokens"), "<u4").tolist()
        checksum = struct.unpack("<I", reader.take(4, "checksum"))[0]
        if reader.position != len(data):
            raise TokenizerError(f"{len(data) - reader.position} bytes after the end")
        if zlib.crc32(data[:-4]) != checksum:
            raise TokenizerError("corrupt (the checksum differs)")
        return cls(
            name.decode("ascii", errors="replace"),
            [blob[start:end] for start, end in zip([0, *ends], ends, strict=False)],
            special=frozenset(specials),
            added=frozenset(addeds),
            merges=pairs if flags & EXPLICIT_MERGES else None,
            whole_pieces=bool(flags & WHOLE_PIECES),
            nfc=bool(flags & NFC),
            prefix_ids=tuple(prefix_ids),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Vocabulary:
        """Read a ``tokenizer.vocab``. Raises TokenizerError naming the file."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror}") from None
        return cls.from_bytes(data, str(path))


def utf8(text: str) -> bytes:
    """The bytes of a token's text. Raises TokenizerError for half of a surrogate pair, which is no text."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise TokenizerError(f"token {text!r} holds half of a surrogate pair, so it is not text") from None


class _Reader:
    """Cuts parts off a file's content, refusing to read past its end."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self.position = position

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise TokenizerError(f"truncated: the {what} end at byte {end}, the file at {len(self._data)}")
        part = self._data[self.position : end]
        self.position = end
        return part


def by_id(tokens: Mapping[int, bytes]) -> list[bytes]:
    """A list indexed by id, empty where there is no token."""
    listed = [b""] * (1 + max(tokens, default=-1))
    for token_id, token in tokens.items():
        listed[token_id] = token
    return listed
