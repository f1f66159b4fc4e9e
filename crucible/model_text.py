"""ModelText: the text side of a model directory, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crucible.config import ModelConfig
from crucible.errors import CheckpointError, TokenizerError
from crucible.tokenizer import JSON_FILE, VOCABULARY_FILE, IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from crucible.chat_template import ChatTemplate


class ModelText:
    """Tokenizer and chat template of the model in ``path``.

    tokenizer: ``None`` where the directory has none (ids still work). Raises TokenizerError for one that cannot be
    used, and CheckpointError where it is not this model's (``check_vocabulary``).
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self.tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        if any((path / name).exists() for name in (VOCABULARY_FILE, JSON_FILE)):
            self.tokenizer = Tokenizer.for_checkpoint(path)
            check_vocabulary(path, config, self.tokenizer)

    @property
    def template(self) -> ChatTemplate:
        """The chat template; the plain transcript where the model has none."""
        if self._template is None:
            from crucible.chat_template import ChatTemplate  # brings Jinja: loaded on use

            self._template = ChatTemplate.for_checkpoint(self.path)
        return self._template

    def required(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError where there is none."""
        if self.tokenizer is None:
            raise TokenizerError(f"{self.path} has no tokenizer; give token ids instead of text")
        return self.tokenizer

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Ids of ``text``; with ``chat`` and a model that has a chat template, of a user's message holding it."""
        tokenizer = self.required()
        if chat and not self.template.is_plain:
            return self.template.encode([{"role": "user", "content": text}], tokenizer)
        return tokenizer.encode_prompt(text)

    def decode(self, ids: list[int]) -> str:
        """The text of generated ids, as the pieces of a stream join to it; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        decoder = IncrementalDecoder(self.tokenizer)
        return "".join(map(decoder.push, ids)) + decoder.flush()


def check_vocabulary(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that cannot be the model's: more ids than it has rows, or fewer than it may generate.

    Raises CheckpointError naming both numbers.
    """
    if tokenizer.token_count > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.token_count} ids and the model only {config.vocab_size} (vocab_size)"
            "; it belongs to another model"
        )
    if config.token_count > tokenizer.token_count:
        raise CheckpointError(
            f"{path}: the model may generate {config.token_count} ids (token_count) and the tokenizer has only "
            f"{tokenizer.token_count}; set token_count in config.json or give the model its own tokenizer"
        )
