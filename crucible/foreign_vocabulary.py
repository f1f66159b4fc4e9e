"""Vocabularies from other formats: a Hugging Face ``tokenizer.json`` and the tokenizer fields of a GGUF file.

Only byte-level BPE is read; what changes ids and cannot be represented is refused by name rather than dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.errors import CheckpointError, TokenizerError
from crucible.json_file import parse_json, shown
from crucible.vocabulary import MAX_TOKENS, Vocabulary, by_id, utf8

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_HEAD_UNGROUPED = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|"
SPLIT_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    _HEAD + r"\p{N}{1,3}" + _TAIL: "llama3",
    _HEAD_UNGROUPED + r"\p{N}{1,3}" + _TAIL: "llama3",
    _HEAD + r"\p{N}" + _TAIL: "qwen2",
}
"""The regular expressions of ``Split`` pre-tokenizers that the scanner implements."""

GGUF_PATTERNS = {"gpt-2": "gpt2", "smollm": "smollm", "llama-bpe": "llama3", "qwen2": "qwen2"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


def _byte_characters() -> dict[int, int]:
    """GPT-2's printable spelling of bytes, as a table for str.translate: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def spelled_bytes(text: str) -> bytes:
    """The bytes that GPT-2's printable spelling ``text`` stands for; TokenizerError for a character outside it."""
    try:
        return bytes([BYTE_CHARACTERS[ord(character)] for character in text])
    except KeyError as error:
        raise TokenizerError(
            f"token {shown(text)} holds U+{error.args[0]:04X}, which spells no byte: not a byte-level vocabulary"
        ) from None


def read_tokenizer_json(data: bytes) -> Vocabulary:
    """See ``Vocabulary.from_tokenizer_json``."""
    try:
        content = parse_json(data, "the tokenizer file")
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None
    if not isinstance(content.get("model"), dict):
        raise TokenizerError("the tokenizer file has no model")
    model = content["model"]
    _check_model(model)
    for name in ("truncation", "padding"):
        if content.get(name) is not None:
            raise TokenizerError(f"{name} is set, which would change prompts; set it to null in the tokenizer file")
    if (decoder := content.get("decoder")) is not None and _type(decoder, "decoder") != "ByteLevel":
        raise TokenizerError(f"decoder {shown(_type(decoder, 'decoder'))} is not supported; only ByteLevel is")
    nfc = _reads_nfc(content.get("normalizer"))
    pattern = _pattern(content.get("pre_tokenizer"))
    literal, special, added = _added_tokens(content.get("added_tokens"))
    spelled: dict[str, int] = {}
    for text, token_id in model["vocab"].items():
        if not _is_id(token_id):
            raise TokenizerError(f"token {shown(text)} has the id {shown(token_id)}; ids are 0 … {MAX_TOKENS - 1}")
        if literal.get(token_id, text) != text:
            raise TokenizerError(f"id {token_id} is both {shown(text)} and the added token {shown(literal[token_id])}")
        if token_id not in literal:
            spelled[text] = token_id
    tokens = _joined(spelled.items(), literal)
    merges = _merge_ids(model["merges"], spelled)
    prefix = _prefix_ids(content.get("post_processor"))
    return Vocabulary(pattern, tokens, special, added, merges, _flag(model, "ignore_merges"), nfc, prefix)


def read_gguf_fields(
    tokens: Sequence[str], token_types: Sequence[int], merges: Sequence[str], pre: str, prefix_ids: Sequence[int] = ()
) -> Vocabulary:
    """See ``Vocabulary.from_gguf_fields``."""
    if not isinstance(pre, str) or pre not in GGUF_PATTERNS:
        raise TokenizerError(f"tokenizer.ggml.pre is {shown(pre)}; known are {', '.join(GGUF_PATTERNS)}")
    if len(token_types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(token_types)} entries for {len(tokens)} tokens")
    spelled: dict[str, int] = {}
    literal: dict[int, str] = {}
    kinds: dict[int, list[int]] = {CONTROL: [], USER_DEFINED: []}
    for token_id, (text, kind) in enumerate(zip(tokens, token_types, strict=True)):
        if not isinstance(text, str):
            raise TokenizerError(f"token {token_id} ({shown(text)}) is not text")
        if kind == NORMAL:
            if text in spelled:
                raise TokenizerError(f"tokens {spelled[text]} and {token_id} are both {shown(text)}")
            spelled[text] = token_id
        elif kind in (CONTROL, UNKNOWN, USER_DEFINED):
            literal[token_id] = text
            kinds[USER_DEFINED if kind == USER_DEFINED else CONTROL].append(token_id)
        elif kind != UNUSED:
            fault = f"has type {shown(kind)}: not a byte-level BPE vocabulary"
            raise TokenizerError(f"token {token_id} ({shown(text)}) {fault}")
    pattern = GGUF_PATTERNS[pre]
    return Vocabulary(
        pattern,
        _joined(spelled.items(), literal),
        frozenset(kinds[CONTROL]),
        frozenset(kinds[USER_DEFINED]),
        _merge_ids(merges, spelled),
        whole_pieces=pattern == "llama3",  # its tokenizer.json says ignore_merges; GGUF has no field for it
        nfc=pattern == "qwen2",
        prefix_ids=tuple(prefix_ids),
    )


def _type(part: Any, what: str) -> str:
    """The ``type`` of a component of a tokenizer.json."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise TokenizerError(f"{what} {shown(part)} is not supported: it is no object with a type")
    return kind


def _steps(part: Any, what: str, key: str) -> list[dict[str, Any]]:
    """The components of a Sequence (its list ``key``), or the only one; none for null."""
    if part is None:
        return []
    steps = part.get(key) if _type(part, what) == "Sequence" else [part]
    if not isinstance(steps, list):
        raise TokenizerError(f"{what}: the Sequence must hold a list of {key}, got {shown(steps)}")
    for step in steps:
        _type(step, what)
    return steps


def _flag(part: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """The switch ``name`` of a component."""
    value = part.get(name, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{name} must be true or false, got {shown(value)}")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKENS  # a bool is an int to Python


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"tokenizer model {shown(model['type'])} is not supported; only byte-level BPE is")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise TokenizerError(f"tokenizer model with {name} = {shown(model[name])} is not supported")
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise TokenizerError("the tokenizer model lacks its vocab or merges")


def _reads_nfc(normalizer: Any) -> bool:
    steps = _steps(normalizer, "normalizer", "normalizers")
    for step in steps:
        if step["type"] != "NFC":
            raise TokenizerError(f"normalizer {shown(step['type'])} is not supported; only NFC is")
    return bool(steps)


def _pattern(pre_tokenizer: Any) -> str:
    """The scanner's name for what the pre-tokenizer does."""
    steps = _steps(pre_tokenizer, "pre-tokenizer", "pretokenizers")
    names = " + ".join(step["type"] for step in steps) or "null"
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise TokenizerError(f"pre-tokenizer {shown(names)} is not supported; it must end with ByteLevel")
    *first, last = steps
    if _flag(last, "add_prefix_space", True):
        raise TokenizerError("a ByteLevel pre-tokenizer with add_prefix_space is not supported")
    if _flag(last, "use_regex", True):
        if not first:
            return "gpt2"
        if len(first) == 1 and first[0]["type"] == "Digits" and _flag(first[0], "individual_digits"):
            return "smollm"
    elif len(first) == 1 and first[0]["type"] == "Split":
        pattern = first[0].get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if first[0].get("behavior") == "Isolated" and not _flag(first[0], "invert") and isinstance(regex, str):
            for known, name in SPLIT_PATTERNS.items():
                if regex == known:
                    return name
        raise TokenizerError(f"a Split pre-tokenizer with the pattern {shown(regex)} is not supported")
    raise TokenizerError(
        f"pre-tokenizer {shown(names)} is not supported; known are those of GPT-2, SmolLM2, Llama 3, Qwen2"
    )


def _added_tokens(entries: Any) -> tuple[dict[int, str], frozenset[int], frozenset[int]]:
    """Texts by id, special ids and other ids of ``added_tokens``."""
    texts: dict[int, str] = {}
    special: set[int] = set()
    if not isinstance(entries, list | None):
        raise TokenizerError(f"added_tokens must be a list, got {shown(entries)}")
    for entry in entries or []:
        if not isinstance(entry, dict) or "id" not in entry or "content" not in entry:
            raise TokenizerError(f"added token {shown(entry)} lacks its id or content")
        token_id, text = entry["id"], entry["content"]
        if not _is_id(token_id) or not isinstance(text, str) or not text:
            raise TokenizerError(f"added token {shown(text)} is empty or has an unusable id {shown(token_id)}")
        for name in ("lstrip", "rstrip", "single_word"):
            if _flag(entry, name):
                raise TokenizerError(f"added token {shown(text)} with {name} is not supported")
        if texts.setdefault(token_id, text) != text:
            raise TokenizerError(f"id {token_id} is both {shown(texts[token_id])} and {shown(text)}")
        if _flag(entry, "special"):
            special.add(token_id)
    return texts, frozenset(special), frozenset(texts) - special


def _prefix_ids(post_processor: Any) -> tuple[int, ...]:
    """The ids that the post-processor puts before a text. What puts some after it would end every prompt: refused."""
    ids: list[int] = []
    for step in _steps(post_processor, "post-processor", "processors"):
        if step["type"] == "TemplateProcessing":
            ids[:0] = _template_prefix(step)
        elif step["type"] != "ByteLevel":  # that one only trims the offsets of tokens
            raise TokenizerError(f"post-processor {shown(step['type'])} is not supported")
    return tuple(ids)


def _template_prefix(step: Mapping[str, Any]) -> list[int]:
    """The ids of ``single``'s special tokens, all of which must come before its ``Sequence`` (the text)."""
    pieces, tokens = step.get("single"), step.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(tokens, dict) or not pieces or not _named(pieces[-1], "Sequence"):
        raise TokenizerError("a TemplateProcessing that does not end with the text is not supported")
    ids: list[int] = []
    for piece in pieces[:-1]:
        name = _named(piece, "SpecialToken")
        entry = tokens.get(name) if name else None
        found = entry.get("ids") if isinstance(entry, dict) else None
        if not isinstance(found, list) or not all(map(_is_id, found)):
            raise TokenizerError(f"a TemplateProcessing with {shown(piece)} before the text is not supported")
        ids += found
    return ids


def _named(piece: Any, kind: str) -> str | None:
    """The id of ``{kind: {"id": …}}``."""
    part = piece.get(kind) if isinstance(piece, dict) else None
    name = part.get("id") if isinstance(part, dict) else None
    return name if isinstance(name, str) else None


def _joined(spelled: Iterable[tuple[str, int]], literal: Mapping[int, str]) -> list[bytes]:
    tokens = {token_id: utf8(text) for token_id, text in literal.items()}
    for text, token_id in spelled:
        if token_id in tokens:
            raise TokenizerError(f"id {token_id} is given to two tokens, one of them {shown(text)}")
        tokens[token_id] = spelled_bytes(text)
    return by_id(tokens)


def _merge_ids(merges: Sequence[Any], spelled: Mapping[str, int]) -> NDArray[np.uint32]:
    """uint32 [n, 2] of merges written as ``"left right"`` or ``["left", "right"]``."""
    pairs = np.empty((len(merges), 2), np.uint32)
    for rank, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge if isinstance(merge, list) else []
        try:
            left, right = parts
            pairs[rank] = spelled[left], spelled[right]
        except (TypeError, ValueError, KeyError):
            raise TokenizerError(f"merge {rank} ({shown(merge)}) is not two tokens of the vocabulary") from None
    return pairs
