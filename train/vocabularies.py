"""Which vocabulary the data is prepared with, and how a ranked one is made smaller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crucible.errors import TokenizerError
from crucible.vocabulary import Vocabulary
from crucible_train.errors import TrainingError

SEPARATOR = "<|endoftext|>"
VOCAB_MULTIPLE = 64


def load_vocabulary(name: str | Path = "gpt2", size: int | None = None) -> Vocabulary:
    """``gpt2``, a ``tokenizer.vocab``, a ``tokenizer.json``, or a directory that holds one of those.

    ``size``: as ``truncated``. Raises TrainingError naming what cannot be used.
    """
    try:
        vocabulary = _load(name)
    except TokenizerError as error:
        raise TrainingError(str(error)) from None
    return vocabulary if size is None else truncated(vocabulary, size)


def _load(name: str | Path) -> Vocabulary:
    if str(name) == "gpt2":
        import importlib.resources

        data = (importlib.resources.files("crucible.data") / "gpt2.vocab").read_bytes()
        return Vocabulary.from_bytes(data, "gpt2.vocab")
    path = Path(name)
    if path.is_dir():
        path = next((path / file for file in ("tokenizer.vocab", "tokenizer.json") if (path / file).is_file()), path)
        if path.is_dir():
            raise TrainingError(f"{path}: holds neither tokenizer.vocab nor tokenizer.json")
    if path.suffix != ".json":
        return Vocabulary.from_file(path)
    try:
        return Vocabulary.from_tokenizer_json(path.read_bytes())
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror}") from None
    except TokenizerError as error:
        raise TrainingError(f"{path}: {error}") from None


def truncated(vocabulary: Vocabulary, ranks: int, separator: str = SEPARATOR) -> Vocabulary:
    """The vocabulary of the first ``ranks`` ranks, and the separator with the id ``ranks``.

    The ranks of byte pair encoding are in the order in which it found its merges, so any first part of them is a
    vocabulary of its own. Raises TrainingError where ids are not such ranks, or ``ranks`` is more than there are or
    leaves a byte out.
    """
    if vocabulary.merges is not None or vocabulary.added or vocabulary.prefix_ids:
        raise TrainingError("--vocabulary-size: only a ranked vocabulary such as gpt2 can be shortened, not this one")
    there = min(vocabulary.special, default=len(vocabulary.tokens))
    if not 256 <= ranks <= there:
        raise TrainingError(
            f"--vocabulary-size {ranks}: this vocabulary has {there} ranked tokens; give 256 to {there}"
        )
    tokens = list(vocabulary.tokens[:ranks])
    if missing := {bytes([byte]) for byte in range(256)} - set(tokens):
        raise TrainingError(f"--vocabulary-size {ranks}: the byte 0x{min(missing).hex()} is not among these tokens")
    return replace(vocabulary, tokens=[*tokens, separator.encode()], special=frozenset({ranks}))


def separator_id(vocabulary: Vocabulary, separator: str = SEPARATOR) -> int:
    """The id between documents. Raises TrainingError naming the special tokens when ``separator`` is none of them."""
    special = vocabulary.special_tokens
    if separator not in special:
        known = ", ".join(special) or "none"
        raise TrainingError(f"--separator {separator}: not a special token of this vocabulary; it has {known}")
    return special[separator]


def padded(token_count: int) -> int:
    """The rows of an embedding table for so many ids: the next multiple of VOCAB_MULTIPLE."""
    return -(-token_count // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
