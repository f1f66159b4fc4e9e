"""Byte-level BPE: UTF-8 to token ids and back; stub of native/bpe.pyx."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PATTERNS: dict[str, int]

def character_classes() -> bytes:
    """One byte a code point (0x110000): 0 other, 1 letter, 2 number, 3 white space."""

def pieces(pattern: str, data: bytes) -> list[bytes]:
    """The pieces that the pattern cuts valid UTF-8 into."""

class BytePairEncoder:
    token_count: int
    def __init__(
        self,
        pattern: str,
        tokens: list[bytes],
        ranked: bytes,
        merges: NDArray[np.uint32] | None = None,
        whole_pieces: bool = True,
    ) -> None:
        """``ranked[id]`` is 1 when text may become the token. ``merges``: [n, 2] rows of (left, right) ids by priority,
        or None: any two neighbours that make a token, lowest id first. ``whole_pieces``: a piece that is a token
        becomes it whatever the merges say.

        ValueError on a vocabulary past the table limits, two equal ranked tokens or a merge without a token.
        """

    def encode(self, data: bytes) -> tuple[list[int], int]:
        """(ids, number of tokens of the last piece) of valid UTF-8; LookupError(offset) at a byte without a token."""

    def encode_packed(self, data: bytes) -> bytes:
        """The ids of valid UTF-8 as native uint32; LookupError(offset) at a byte without a token."""

    def encode_unsplit(self, data: bytes) -> list[int]:
        """The ids of any bytes taken as one piece; LookupError(offset) at a byte without a token."""

    def decode(self, ids: Sequence[int]) -> bytes:
        """The tokens' bytes, joined; IndexError(id) for an id without a token."""

    def token(self, token: int) -> bytes:
        """One token's bytes; IndexError(id) for an id without a token."""
