"""IncrementalDecoder: the text of a stream of tokens, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crucible.errors import TokenizerError

if TYPE_CHECKING:
    from crucible.tokenizer import Tokenizer


class IncrementalDecoder:
    """Turns tokens into text as they come; bytes are held back only while they may still become a character.

    The pieces and the flush, joined, equal ``tokenizer.decode`` of all ids with the same ``skip_special``. An id below
    ``token_count`` that the vocabulary leaves out has no text: a model may have a row for it and choose it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._held = b""

    def push(self, token_id: int) -> str:
        """The text that the token completes; may be empty. Raises TokenizerError for an id past the vocabulary."""
        if token_id in self._skipped:
            return ""
        try:
            data = self._held + self._tokenizer.token_bytes(token_id)
        except TokenizerError:
            if 0 <= token_id < self._tokenizer.token_count:
                return ""
            raise
        cut = len(data) - unfinished(data)
        self._held = data[cut:]
        return data[:cut].decode("utf-8", errors="replace")

    def flush(self) -> str:
        """What is still held, which no token will complete any more: at most one U+FFFD."""
        held, self._held = self._held, b""
        return held.decode("utf-8", errors="replace")


def unfinished(data: bytes) -> int:
    """The number of bytes (0 … 3) at the end of ``data`` that begin a character and do not finish it.

    Follows table 3-7 of the Unicode standard: E0, ED, F0 and F4 bound the byte after them, so that, for example,
    ED A0 (a surrogate) is known to be invalid at its second byte.
    """
    for count in range(1, min(3, len(data)) + 1):
        byte = data[-count]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            size = 2 if 0xC2 <= byte < 0xE0 else 3 if 0xE0 <= byte < 0xF0 else 4 if 0xF0 <= byte < 0xF5 else 0
            if count >= size or (count > 1 and not _may_follow(byte, data[-count + 1])):
                return 0
            return count
    return 0


def _may_follow(lead: int, second: int) -> bool:
    low = {0xE0: 0xA0, 0xF0: 0x90}.get(lead, 0x80)
    high = {0xED: 0x9F, 0xF4: 0x8F}.get(lead, 0xBF)
    return low <= second <= high
