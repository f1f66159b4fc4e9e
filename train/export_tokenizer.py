"""A vocabulary in other programs' formats: Hugging Face ``tokenizer.json`` and tiktoken's rank file.

Both give the ids that ours gives. A vocabulary of ranks has no merges; they follow from the ranks, since every token
of a byte pair encoding was made by joining two that come before it.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crucible.foreign_vocabulary import BYTE_CHARACTERS, SPLIT_PATTERNS
from crucible.tokenizer import JSON_FILE, VOCABULARY_FILE, Tokenizer, Vocabulary
from crucible_train.errors import TrainingError
from crucible_train.export_target import export_file
from crucible_train.vocabularies import load_vocabulary

FORMATS = {"json": ".json", "tiktoken": ".tiktoken", "vocab": ".vocab"}
"""Formats of ``export_tokenizer`` and the suffix that stands for each."""

_SPELLING = {byte: chr(character) for character, byte in BYTE_CHARACTERS.items()}


def export_tokenizer(source: str | Path, target: str | Path, form: str | None = None) -> Path:
    """Writes the vocabulary of ``source`` to the file ``target``; returns ``target``.

    source: ``gpt2``, a run, model or data directory, or a vocabulary file. form: a key of FORMATS; None takes the one
    that ``target``'s suffix stands for. Raises CrucibleError, one line.
    """
    target = Path(target)
    form = form or next((name for name, suffix in FORMATS.items() if suffix == target.suffix), None)
    if form is None:
        raise TrainingError(f"{target}: which format? give --format or a suffix of {', '.join(FORMATS.values())}")
    vocabulary = find_vocabulary(source)
    if form == "json":
        content = tokenizer_json(vocabulary)
    else:
        content = tiktoken_ranks(vocabulary) if form == "tiktoken" else vocabulary.to_bytes()
    with export_file(target) as partial:
        partial.write_bytes(content)
    return target


def find_vocabulary(source: str | Path) -> Vocabulary:
    """The vocabulary that ``source`` means (see ``export_tokenizer``)."""
    from crucible_train.export_source import find_checkpoint, read_vocabulary

    path = Path(source)
    if not path.is_dir() or any((path / name).is_file() for name in (VOCABULARY_FILE, JSON_FILE)):
        return load_vocabulary(source)
    found = read_vocabulary(find_checkpoint(path))
    if found is None:
        raise TrainingError(f"{path}: no {VOCABULARY_FILE} in it")
    return found


def spelled(token: bytes) -> str:
    """``token`` in GPT-2's printable spelling, a character a byte."""
    return "".join(map(_SPELLING.__getitem__, token))


def ordinary_tokens(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Ids of the tokens that text is made of, in order of id: neither special nor added."""
    other = vocabulary.special | vocabulary.added
    return {token: number for number, token in enumerate(vocabulary.tokens) if token and number not in other}


def merges(vocabulary: Vocabulary) -> list[tuple[bytes, bytes]]:
    """The merges by priority: the vocabulary's own, or those that its ranks imply.

    A token's merge is what is left of its bytes when every lower rank has been joined. A token that leaves more than
    two parts has none: no text reaches it but as a whole piece (``unreachable``).
    """
    tokens = vocabulary.tokens
    if vocabulary.merges is not None:
        return [(tokens[left], tokens[right]) for left, right in vocabulary.merges.tolist()]
    ranks = ordinary_tokens(vocabulary)
    pairs = (_parts(token, ranks, rank) for token, rank in ranks.items() if len(token) > 1)
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def unreachable(vocabulary: Vocabulary, pairs: list[tuple[bytes, bytes]]) -> int:
    """How many ordinary tokens of several bytes no merge of ``pairs`` makes."""
    made = {left + right for left, right in pairs}
    return sum(len(token) > 1 and token not in made for token in ordinary_tokens(vocabulary))


def _parts(token: bytes, ranks: Mapping[bytes, int], limit: int) -> list[bytes]:
    """``token`` after joining, lowest rank first, all neighbours whose rank is below ``limit``."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, limit) for left, right in itertools.pairwise(parts)]
        rank = min(joined)
        if rank >= limit:
            break
        place = joined.index(rank)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def tokenizer_json(vocabulary: Vocabulary) -> bytes:
    """The ``tokenizer.json`` that PyPI tokenizers and transformers load.

    Special tokens' texts become their ids there, as always in transformers; ours does that only when asked. Raises
    TrainingError for a special token that is spelled like an ordinary one.
    """
    ordinary = ordinary_tokens(vocabulary)
    table = {spelled(token): number for token, number in ordinary.items()}
    literals = {**vocabulary.special_tokens, **vocabulary.added_tokens}
    for text, number in literals.items():
        if text in table:
            raise TrainingError(f"special token {text!r} is spelled like token {table[text]}; rename it")
        table[text] = number
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(text, number, vocabulary) for text, number in sorted(literals.items(), key=_number)],
        "normalizer": {"type": "NFC"} if vocabulary.nfc else None,
        "pre_tokenizer": _pre_tokenizer(vocabulary.pattern),
        "post_processor": _post_processor(vocabulary),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": vocabulary.whole_pieces,
            "vocab": dict(sorted(table.items(), key=_number)),
            "merges": [[spelled(left), spelled(right)] for left, right in merges(vocabulary)],
        },
    }
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def tokenizer_settings(vocabulary: Vocabulary, context: int, bos: int | None, eos: int | None) -> dict[str, Any]:
    """The content of the ``tokenizer_config.json`` beside it."""
    texts = {number: text for text, number in {**vocabulary.added_tokens, **vocabulary.special_tokens}.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    for name, number in (("bos_token", bos), ("eos_token", eos)):
        if number in texts:
            settings[name] = texts[number]
    return settings


def tiktoken_ranks(vocabulary: Vocabulary) -> bytes:
    """tiktoken's rank file: a line of base64 and rank for each ordinary token; special tokens are not in it.

    tiktoken must be given the same pre-tokenizer. Raises TrainingError where merging by rank would not give our ids:
    for other merges, a normaliser or added tokens.
    """
    if vocabulary.nfc or vocabulary.added:
        raise TrainingError("a vocabulary with a normaliser or added tokens has no tiktoken form; use tokenizer.json")
    ordinary = ordinary_tokens(vocabulary)
    if vocabulary.merges is not None:
        ranked = Vocabulary(vocabulary.pattern, vocabulary.tokens, vocabulary.special, vocabulary.added)
        if merges(ranked) != merges(vocabulary):
            raise TrainingError("this vocabulary's merges are not in the order of its ids; use tokenizer.json")
    return b"".join(b"%s %d\n" % (base64.b64encode(token), number) for token, number in ordinary.items())


def check_same(vocabulary: Vocabulary, exported: bytes) -> None:
    """Reads a ``tokenizer.json`` back and compares ids on a text of every token. Raises TrainingError."""
    ours, theirs = Tokenizer(vocabulary), Tokenizer(Vocabulary.from_tokenizer_json(exported))
    text = b"".join(token for token in ordinary_tokens(vocabulary) if _is_text(token)).decode()
    if ours.encode(text) != theirs.encode(text):
        raise TrainingError("the tokenizer.json of this vocabulary does not encode as the vocabulary does")


def _is_text(token: bytes) -> bool:
    try:
        return bool(token.decode())
    except UnicodeDecodeError:
        return False


def _number(entry: tuple[str, int]) -> int:
    return entry[1]


def _added(text: str, number: int, vocabulary: Vocabulary) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": number in vocabulary.special}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    if pattern == "gpt2":
        return _byte_level(use_regex=True)
    if pattern == "smollm":
        first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [first, _byte_level(use_regex=True)]}
    regex = next((regex for regex, name in SPLIT_PATTERNS.items() if name == pattern), None)
    if regex is None:
        raise TrainingError(f"the pre-tokenizer {pattern!r} has no form in tokenizer.json")
    first = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [first, _byte_level(use_regex=False)]}


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any]:
    """What goes before a text; without that, ByteLevel, which only trims offsets."""
    if not vocabulary.prefix_ids:
        return _byte_level(use_regex=True)
    names = {number: vocabulary.tokens[number].decode() for number in vocabulary.prefix_ids}
    prefix = [{"SpecialToken": {"id": names[number], "type_id": 0}} for number in vocabulary.prefix_ids]
    first, second = ({"Sequence": {"id": which, "type_id": 0}} for which in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": [*prefix, first],
        "pair": [*prefix, first, second],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in names.items()},
    }
