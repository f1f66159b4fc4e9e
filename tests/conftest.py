"""Fixtures that many tests share: a two-layer model with a tokenizer, on disk as a native checkpoint."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint

SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_vocabulary() -> bytes:
    """The ``tokenizer.vocab`` of a tokenizer without merges: a token a byte, and the special tokens."""
    from crucible.vocabulary import Vocabulary

    ranks = "\n".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256))
    return Vocabulary.from_tiktoken(ranks, special=SPECIAL).to_bytes()


def make_text_checkpoint(directory: Path, *, chat: bool = False, **changes: Any) -> Path:
    """A tiny model that speaks bytes: ids 0–255 are bytes, 256–258 special, 259–263 padding; context 128, eos 256."""
    files = {"tokenizer.vocab": byte_vocabulary()}
    if chat:
        files["chat_template.jinja"] = CHAT_TEMPLATE.encode()
    values: dict[str, Any] = {
        "vocab_size": 264,
        "token_count": 259,
        "context_length": 128,
        "tied_embeddings": False,
        "bos_token_id": None,
        "eos_token_ids": [256],
    }
    return make_checkpoint(directory, files=files, **{**values, **changes})


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """make_text_checkpoint without a chat template."""
    return make_text_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a ChatML template."""
    return make_text_checkpoint(tmp_path_factory.mktemp("models") / "tiny-chat", chat=True)
