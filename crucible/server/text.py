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

    def encode(self, prompt: str) -> list[int]:
        """Ids of ``prompt``; raises RequestError(param="prompt") for text the vocabulary cannot represent."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to the assistant's next word; raises RequestError(param="messages")."""

    def decoder(self) -> Decoder: ...


class CheckpointText:
    """The tokenizer and chat template in a model directory."""

    def __init__(self, path: str) -> None:
        from crucible.chat_template import ChatTemplate
        from crucible.tokenizer import Tokenizer

        directory = Path(path)
        self._tokenizer = Tokenizer.for_checkpoint(directory)
        self._template = ChatTemplate.for_checkpoint(directory, self._tokenizer)
        self.has_template = not self._template.is_plain

    def encode(self, prompt: str) -> list[int]:
        try:
            return self._tokenizer.encode(prompt)
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
