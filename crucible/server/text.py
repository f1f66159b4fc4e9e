"""The text boundary of an http worker: prompts and conversations to ids, ids to text. No weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from crucible.errors import RequestError, TokenizerError


class Decoder(Protocol):
    """Turns a stream of ids into text, holding bytes only while they may still become a character."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Text(Protocol):
    """What the routes need of a vocabulary and its chat template."""

    has_template: bool
    longest: int
    """Bytes of the longest token: text with more characters than that a token of the context never fits."""

    def encode(self, prompt: str) -> list[int]:
        """Ids of ``prompt``; raises RequestError(param="prompt") for text the vocabulary cannot represent."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to the assistant's next word; raises RequestError(param="messages")."""

    def decoder(self) -> Decoder: ...


class CheckpointText:
    """The tokenizer and chat template in a model directory."""

    def __init__(self, path: str) -> None:
        from crucible.chat_template import ChatTemplate
        from crucible.checkpoint import open_checkpoint
        from crucible.model_text import check_vocabulary
        from crucible.tokenizer import Tokenizer

        directory = Path(path)
        self._tokenizer = Tokenizer.for_checkpoint(directory)
        with open_checkpoint(directory) as checkpoint:
            check_vocabulary(directory, checkpoint.config, self._tokenizer)
        self._template = ChatTemplate.for_checkpoint(directory, self._tokenizer)
        self.has_template = not self._template.is_plain
        self.longest = max(map(self._length, range(self._tokenizer.token_count)))

    def _length(self, token_id: int) -> int:
        try:
            return len(self._tokenizer.token_bytes(token_id))
        except TokenizerError:  # a hole in the vocabulary
            return 0

    def encode(self, prompt: str) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(prompt)
        except TokenizerError as error:
            raise RequestError(str(error), "prompt") from None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        try:
            return self._template.encode(messages, self._tokenizer)
        except TokenizerError as error:
            raise RequestError(str(error), "messages") from None

    def decoder(self) -> Decoder:
        from crucible.tokenizer import IncrementalDecoder

        return IncrementalDecoder(self._tokenizer, skip_special=True)
