"""``manifest.json``: what a directory of prepared data holds and what it was made of."""

from __future__ import annotations

from pathlib import Path

import msgspec

from crucible_train.errors import TrainingError

VERSION = 1
SPLITS = ("train", "val")
MANIFEST_FILE = "manifest.json"


class ShardInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shard in the manifest; ``sha256`` is of the whole file."""

    file: str
    tokens: int
    documents: int
    sha256: str


class SplitInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One split in the manifest. ``tokens`` include the separators, ``bytes`` are of the text (UTF-8) without them."""

    tokens: int
    documents: int
    bytes: int
    shards: list[ShardInfo]


class SourceInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input in the manifest: ``sha256`` is of the file as it lies there (for a Hub dataset of what was read)."""

    name: str
    format: str
    bytes: int
    sha256: str
    documents: int


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that decides what the shards hold; ``inputs`` are (name, size) in reading order."""

    vocabulary_sha256: str
    separator: str
    text_field: str
    val_fraction: float
    shard_tokens: int
    limit_tokens: int | None
    block_bytes: int
    document_bytes: int
    inputs: list[tuple[str, int]]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. ``token_count``: ids in the vocabulary; ``vocab_size``: that padded to a multiple of 64."""

    version: int
    settings: Settings
    dtype: str
    token_count: int
    vocab_size: int
    separator_id: int
    split_rule: str
    splits: dict[str, SplitInfo]
    sources: list[SourceInfo]
    empty_documents: int
    cut_documents: int


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a prepared directory. Raises TrainingError when there is none, or not one of this version."""
    path = Path(directory) / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        hint = "an unfinished one goes on when the same prepare command is given again"
        raise TrainingError(f"{directory}: no prepared data ({MANIFEST_FILE} is not there); {hint}") from None
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path}: not a manifest of this Crucible ({error}); prepare the data again") from None
    if manifest.version != VERSION:
        raise TrainingError(
            f"{path}: version {manifest.version}; this Crucible reads {VERSION}: prepare the data again"
        )
    return manifest
