"""Small vocabularies and prepared directories for the tests of the data side."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crucible.vocabulary import Vocabulary
from crucible_train.files import file_sha256
from crucible_train.manifest import Manifest
from crucible_train.prepare import prepare
from crucible_train.shard_writer import ShardWriter
from crucible_train.shards import TokenDataset, open_shard

WORDS = ["alpha", "beta", "river", "stone", "light", "seven", "under", "because"]
SEPARATOR_ID = 256


def byte_vocabulary(pairs: int = 0) -> Vocabulary:
    """A token a byte, then so many tokens of two bytes, then ``<|endoftext|>``."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([index >> 8, index & 255]) for index in range(pairs)]
    ranks = "\n".join(f"{base64.b64encode(token).decode()} {index}" for index, token in enumerate(tokens))
    return Vocabulary.from_tiktoken(ranks, special={"<|endoftext|>": len(tokens)})


def quick(inputs: list[Path], out: Path, **settings: Any) -> Manifest:
    """prepare with a byte vocabulary, in this process."""
    return prepare(inputs, out, **{"vocabulary": byte_vocabulary(), "processes": 1, **settings})


def texts(count: int = 60, seed: int = 1) -> list[str]:
    """Documents of a few words, some with a line end."""
    source = random.Random(seed)
    return [
        " ".join(source.choice(WORDS) for _ in range(source.randint(3, 40))) + f" {index}" + ("\n" if index % 3 else "")
        for index in range(count)
    ]


def write_jsonl(path: Path, documents: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def split_tokens(directory: Path, split: str) -> list[int]:
    """All ids of a split, by reading its shards one after the other."""
    shards = [open_shard(path) for path in sorted(directory.glob(f"{split}-*.tokens"))]
    return [int(token) for shard in shards for token in shard.tokens]


def documents_of(tokens: Sequence[int], separator: int) -> list[tuple[int, ...]]:
    """The documents of a row of ids, each with its separator; an unfinished end is one too."""
    found: list[tuple[int, ...]] = []
    current: list[int] = []
    for token in tokens:
        current.append(token)
        if token == separator:
            found.append(tuple(current))
            current = []
    return found + ([tuple(current)] if current else [])


def tree(directory: Path) -> dict[str, str]:
    """The sha256 of every file of a directory."""
    return {path.name: file_sha256(path) for path in sorted(directory.iterdir())}


def dataset_of(directory: Path, tokens: int, *, shard_tokens: int = 1000) -> TokenDataset:
    """A train split of exactly so many ids: 0, 1, 2 … modulo 256."""
    vocabulary = byte_vocabulary()
    digest = hashlib.sha256(vocabulary.to_bytes()).digest()
    writer = ShardWriter(
        directory,
        "train",
        id_count=257,
        separator_id=SEPARATOR_ID,
        vocabulary_sha256=digest,
        shard_tokens=shard_tokens,
    )
    writer.append(np.arange(tokens) % 256)
    shards = [
        {"file": info.file, "tokens": info.tokens, "documents": info.documents, "sha256": info.sha256}
        for info in writer.finish()
    ]
    settings = {
        "vocabulary_sha256": digest.hex(),
        "separator": "<|endoftext|>",
        "text_field": "text",
        "val_fraction": 0.0,
        "shard_tokens": shard_tokens,
        "limit_tokens": None,
        "block_bytes": 1,
        "document_bytes": 1,
        "inputs": [],
    }
    manifest = {
        "version": 1,
        "settings": settings,
        "dtype": "uint16",
        "token_count": 257,
        "vocab_size": 320,
        "separator_id": SEPARATOR_ID,
        "split_rule": "",
        "splits": {
            "train": {"tokens": tokens, "documents": 0, "bytes": 3 * tokens, "shards": shards},
            "val": {"tokens": 0, "documents": 0, "bytes": 0, "shards": []},
        },
        "sources": [],
        "empty_documents": 0,
        "cut_documents": 0,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return TokenDataset(directory, "train")
