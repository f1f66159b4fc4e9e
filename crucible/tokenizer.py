"""Tokenizer: text to token ids and back, over the compiled byte pair encoder.

Ids equal tiktoken's (for vocabularies made from its ranks) or Hugging Face tokenizers' (for imported ones) on every
text. A special token's text is ordinary text unless the caller says otherwise.
"""

from __future__ import annotations

import importlib.resources
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crucible.errors import TokenizerError
from crucible.incremental_decoder import IncrementalDecoder
from crucible.native.bpe import BytePairEncoder
from crucible.vocabulary import Vocabulary

__all__ = ["IncrementalDecoder", "Tokenizer", "Vocabulary"]

VOCABULARY_FILE = "tokenizer.vocab"
JSON_FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of one vocabulary; safe to share between threads.

    ``token_count`` is 1 + the highest id; ``special_tokens`` maps each special token's text to its id; ``prefix_ids``
    go before every prompt that is plain text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special_tokens: dict[str, int] = vocabulary.special_tokens
        self.special_ids: frozenset[int] = vocabulary.special
        self.prefix_ids: tuple[int, ...] = vocabulary.prefix_ids
        added = vocabulary.added_tokens
        self._literals = added | self.special_tokens
        self._special = _any_of(self.special_tokens)
        self._added = _any_of(added)
        self._added_or_special = _any_of(self._literals)
        self._nfc = vocabulary.nfc
        ranked = bytearray(bool(token) for token in vocabulary.tokens)
        for token_id in vocabulary.special | vocabulary.added:
            ranked[token_id] = 0
        try:
            self._encoder = BytePairEncoder(
                vocabulary.pattern, list(vocabulary.tokens), bytes(ranked), vocabulary.merges, vocabulary.whole_pieces
            )
        except (ValueError, IndexError) as error:
            raise TokenizerError(f"the vocabulary cannot be used: {error}") from None
        self.token_count: int = self._encoder.token_count

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """GPT-2's vocabulary: 50257 tokens, ``<|endoftext|>`` is 50256."""
        data = (importlib.resources.files("crucible.data") / "gpt2.vocab").read_bytes()
        return cls(Vocabulary.from_bytes(data, "gpt2.vocab"))

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """A ``tokenizer.vocab``, or with the suffix .json a ``tokenizer.json``; TokenizerError names the file."""
        path = Path(path)
        if path.suffix != ".json":
            return cls._named(path, Vocabulary.from_file(path))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror}") from None
        try:
            vocabulary = Vocabulary.from_tokenizer_json(data)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None
        return cls._named(path, vocabulary)

    @classmethod
    def _named(cls, path: Path, vocabulary: Vocabulary) -> Tokenizer:
        try:
            return cls(vocabulary)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    @classmethod
    def for_checkpoint(cls, directory: str | Path) -> Tokenizer:
        """The checkpoint's ``tokenizer.vocab``, else its ``tokenizer.json``; TokenizerError when neither is there."""
        for name in (VOCABULARY_FILE, JSON_FILE):
            if (path := Path(directory) / name).is_file():
                return cls.from_file(path)
        raise TokenizerError(f"{directory} has no tokenizer: neither {VOCABULARY_FILE} nor {JSON_FILE} is there")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of ``text``; lone surrogates count as U+FFFD, as in tiktoken.

        ``allow_special``: the text of a special token becomes its id; otherwise it is ordinary text. Raises
        TokenizerError naming byte and offset (in the UTF-8 form) where a byte has no token.
        """
        text = without_surrogates(text)
        if self._nfc or (self._added_or_special if allow_special else self._added):
            ids: list[int] = []
            offset = 0
            for part in self._parts(text, allow_special):
                if isinstance(part, int):
                    ids.append(part)
                    offset += len(self._encoder.token(part))
                else:
                    data = (unicodedata.normalize("NFC", part) if self._nfc else part).encode("utf-8")
                    ids += self._ordinary(data, offset)[0]
                    offset += len(data)
            return ids
        return self._ordinary(text.encode("utf-8"))[0]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids that a model is given for the raw prompt ``text``: ``prefix_ids``, then those of ``encode``.

        Not for a text that continues another, nor for what a chat template wrote. Raises TokenizerError as ``encode``.
        """
        return [*self.prefix_ids, *self.encode(text)]

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """As ``encode`` without special tokens, for bulk work: uint32 [n], read-only."""
        if self._nfc or self._added:
            return np.array(self.encode(text), np.uint32)
        data = without_surrogates(text).encode("utf-8")
        try:
            return np.frombuffer(self._encoder.encode_packed(data), np.uint32)
        except LookupError as error:
            raise _no_token(data, error.args[0]) from None

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes, as tiktoken's ``_encode_bytes``.

        Valid UTF-8 is ordinary text. Otherwise everything from the start of the last piece before the first invalid
        byte (with the white space before it) to the end is one piece: what was cut off mid-character usually
        belongs to that word.
        """
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            ids, last = self._ordinary(data[: error.start])
            if last and self._is_blank(ids[-last]):
                while last < len(ids) and self._is_blank(ids[-last - 1]):
                    last += 1
            kept = ids[: len(ids) - last]
            rest = self._encoder.decode(ids[len(kept) :]) + data[error.start :]
            try:
                return kept + self._encoder.encode_unsplit(rest)
            except LookupError as missing:
                raise _no_token(data, len(data) - len(rest) + missing.args[0]) from None
        if self._nfc or self._added:
            return self.encode(text)
        return self._ordinary(data)[0]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of ``ids``, special tokens as their text. Raises TokenizerError naming an id without a token."""
        try:
            return self._encoder.decode(ids)
        except (IndexError, OverflowError) as error:
            raise self._no_id(error, ids) from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ``ids``, U+FFFD for what is not UTF-8; ``skip_special`` leaves special tokens out."""
        if skip_special:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token. Raises TokenizerError for an id without a token."""
        try:
            return self._encoder.token(token_id)
        except (IndexError, OverflowError) as error:
            raise self._no_id(error, [token_id]) from None

    def split_special(self, text: str) -> Iterator[str | int]:
        """``text`` cut at its special tokens: their ids, and the text between them."""
        return self._split(self._special, self.special_tokens, text)

    def _parts(self, text: str, allow_special: bool) -> Iterator[str | int]:
        return self._split(self._added_or_special if allow_special else self._added, self._literals, text)

    @staticmethod
    def _split(literals: re.Pattern[str] | None, ids: Mapping[str, int], text: str) -> Iterator[str | int]:
        for index, part in enumerate(literals.split(text) if literals else [text]):
            if index % 2:
                yield ids[part]
            elif part:
                yield part

    def _ordinary(self, data: bytes, offset: int = 0) -> tuple[list[int], int]:
        try:
            return self._encoder.encode(data)
        except LookupError as error:
            raise _no_token(data, error.args[0], offset) from None

    def _is_blank(self, token_id: int) -> bool:
        return not self._encoder.token(token_id).strip(b" \n\t")

    def _no_id(self, error: Exception, ids: Sequence[int]) -> TokenizerError:
        bad = error.args[0] if isinstance(error, IndexError) else next(i for i in ids if abs(i) >= 1 << 63)
        return TokenizerError(f"token id {bad} has no token; this vocabulary has {self.token_count} ids, from 0")


def without_surrogates(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD (as tiktoken does)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _no_token(data: bytes, position: int, offset: int = 0) -> TokenizerError:
    return TokenizerError(
        f"byte 0x{data[position]:02x} at byte offset {offset + position} has no token in this vocabulary; "
        "remove it from the text"
    )


def _any_of(literals: Mapping[str, int]) -> re.Pattern[str] | None:
    """Matches the leftmost, then longest, of the literal texts, as its one group."""
    if not literals:
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) + ")")
