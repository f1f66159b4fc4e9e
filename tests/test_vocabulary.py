"""The vocabulary file, and vocabularies read from other formats against the tokenizers that wrote them."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from crucible.errors import TokenizerError
from crucible.native.bpe import character_classes
from crucible.tokenizer import Tokenizer, Vocabulary
from tests.any_json import mutants, refusals
from tests.test_tokenizer import FRAGMENTS, LLAMA3, RANKS, all_characters, fragments

QWEN2 = LLAMA3.replace("{1,3}", "")
BYTE_LEVEL = {"add_prefix_space": False, "use_regex": True}
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: pre_tokenizers.ByteLevel(**BYTE_LEVEL),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(**BYTE_LEVEL)]
    ),
    "llama3": lambda: split(LLAMA3),
    "qwen2": lambda: split(QWEN2),
}


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(kind: str) -> HubTokenizer:
    """A small tokenizer of the given kind; it has tokens for all bytes, merges, and special and added tokens."""
    tokenizer = HubTokenizer(models.BPE(ignore_merges=kind == "llama3"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    corpus = ["the cat's hat, they'll sing 12345 songs  of\n\nthe THING 日本語 naïve"] * 3 + FRAGMENTS * 2
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|a|>", "<|b|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken("<|ab|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    tokenizer.encode_special_tokens = True
    return tokenizer


TRAINED = {kind: trained(kind) for kind in PRE_TOKENIZERS}
READ = {kind: Tokenizer(Vocabulary.from_tokenizer_json(hub.to_str().encode())) for kind, hub in TRAINED.items()}


@pytest.mark.parametrize("kind", TRAINED)
@settings(max_examples=300, deadline=None)
@given(text=st.one_of(fragments, st.lists(st.sampled_from([*FRAGMENTS, "<|a|>", "<note>", "<|ab|>"])).map("".join)))
def test_tokenizer_json_gives_the_same_ids(kind: str, text: str) -> None:
    ids = TRAINED[kind].encode(text, add_special_tokens=False).ids
    assert READ[kind].encode(text) == ids
    assert READ[kind].encode_bytes(text.encode()) == ids
    assert READ[kind].encode_array(text).tolist() == ids


def test_digits_are_the_numbers_of_the_character_classes() -> None:
    """But for digits of a Unicode version that tiktoken's engine does not know yet; no text holds those."""
    pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("xx".join(all_characters()))
    digits = {piece for piece, _ in pieces if len(piece) == 1}
    ours = set(map(chr, np.flatnonzero(np.frombuffer(character_classes(), np.uint8) == 2).tolist()))
    unassigned = tiktoken.Encoding(
        "unassigned", pat_str=r"\p{Cn}", mergeable_ranks={bytes([byte]): byte for byte in range(256)}, special_tokens={}
    )
    newer = "".join(sorted(digits - ours))
    assert ours <= digits
    assert bytes(unassigned.encode_ordinary(newer)).decode() == newer


def test_special_tokens_of_tokenizer_json() -> None:
    hub = HubTokenizer.from_str(TRAINED["gpt2"].to_str())
    text = "x<|a|><note><|ab|> <|b|>"
    assert READ["gpt2"].encode(text, allow_special=True) == hub.encode(text, add_special_tokens=False).ids
    assert set(READ["gpt2"].special_tokens) == {"<|a|>", "<|b|>", "<|ab|>"}
    assert READ["gpt2"].decode(READ["gpt2"].encode(text)) == text


def test_composed_form_comes_before_merging() -> None:
    assert READ["qwen2"].encode("e\u0301") == READ["qwen2"].encode("é")
    assert READ["gpt2"].encode("e\u0301") != READ["gpt2"].encode("é")


def test_merges_that_are_not_in_id_order_keep_their_own_order() -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4, "abc": 5}
    content = {
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", ["b", "c"]]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    }

    def ids(**model: Any) -> list[int]:
        changed = {**content, "model": {**content["model"], **model}}
        return Tokenizer(Vocabulary.from_tokenizer_json(json.dumps(changed).encode())).encode(
            "abc abc".replace(" ", "")
        )

    assert ids() == [4, 2, 4, 2]
    assert ids(merges=["b c", "a b"]) == [0, 3, 0, 3]
    assert ids(merges=["a b", "ab c"]) == [5, 5]
    assert ids(merges=["a b", "b c", "a b"]) == [0, 3, 0, 3]  # of a pair given twice the last counts
    one = {**content, "model": {**content["model"], "merges": ["a b"]}}
    assert Tokenizer(Vocabulary.from_tokenizer_json(json.dumps(one).encode())).encode("abc") == [4, 2]
    one["model"]["ignore_merges"] = True
    assert Tokenizer(Vocabulary.from_tokenizer_json(json.dumps(one).encode())).encode("abc") == [5]


BOS_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|a|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|a|>": {"id": "<|a|>", "ids": [0], "tokens": ["<|a|>"]}},
}
TRIM = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def gguf_fields(kind: str) -> tuple[list[str], list[int], list[str]]:
    content = json.loads(TRAINED[kind].to_str())
    tokens = {token_id: text for text, token_id in content["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, 1)
    for entry in content["added_tokens"]:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = 3 if entry["special"] else 4
    order = sorted(tokens)
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    return [tokens[token_id] for token_id in order], [types[token_id] for token_id in order], merges


@pytest.mark.parametrize(
    ("kind", "pre"), [("gpt2", "gpt-2"), ("smollm", "smollm"), ("llama3", "llama-bpe"), ("qwen2", "qwen2")]
)
def test_gguf_fields_make_the_same_vocabulary_as_tokenizer_json(kind: str, pre: str) -> None:
    vocabulary = Vocabulary.from_gguf_fields(*gguf_fields(kind), pre)
    assert vocabulary.to_bytes() == Vocabulary.from_tokenizer_json(TRAINED[kind].to_str().encode()).to_bytes()


def test_padding_of_a_gguf_vocabulary_is_no_token() -> None:
    tokens, types, merges = gguf_fields("gpt2")
    vocabulary = Vocabulary.from_gguf_fields([*tokens, "[PAD1]", "[PAD2]"], [*types, 5, 5], merges, "gpt-2")
    assert Tokenizer(vocabulary).token_count == len(tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'"),
        ({"pre": ["gpt-2"]}, r"tokenizer.ggml.pre is \['gpt-2'\]"),
        ({"tokens": ["\ud800"], "token_types": [3]}, "half of a surrogate pair"),
        ({"prefix_ids": [9999]}, "prefix token id 9999 has no token"),
        ({"token_types": [1]}, "has 1 entries for 332 tokens"),
        ({"tokens": ["▁the", *"abc"], "token_types": [1] * 4}, "U\\+2581, which spells no byte"),
        ({"tokens": ["a", "a"], "token_types": [1, 1]}, "tokens 0 and 1 are both 'a'"),
        ({"tokens": ["<0x00>"], "token_types": [6]}, "has type 6"),
        ({"tokens": [7], "token_types": [1]}, "is not text"),
        ({"merges": ["a zz9"]}, "merge 0 \\('a zz9'\\) is not two tokens"),
        ({"merges": ["a b c"]}, "merge 0"),
        ({"tokens": [], "token_types": []}, "must end with a token"),
    ],
)
def test_gguf_fields_that_cannot_be_used(change: dict[str, Any], message: str) -> None:
    tokens, types, merges = gguf_fields("gpt2")
    fields: dict[str, Any] = {"tokens": tokens, "token_types": types, "merges": merges, "pre": "gpt-2"}
    fields |= change
    if "tokens" in change:
        fields["merges"] = []
    with pytest.raises(TokenizerError, match=message):
        Vocabulary.from_gguf_fields(**fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram"}}, "model 'Unigram'"),
        ({"model": {"type": "WordPiece"}}, "model 'WordPiece'"),
        ({"model": {"type": "BPE", "byte_fallback": True}}, "byte_fallback"),
        ({"model": {"type": "BPE", "end_of_word_suffix": "</w>"}}, "end_of_word_suffix"),
        ({"model": {"type": "BPE", "dropout": 0.1}}, "dropout"),
        ({"model": {"type": "BPE", "vocab": {}}}, "lacks its vocab or merges"),
        ({"model": None}, "has no model"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer 'Lowercase'"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"}]}}, "normalizer 'Prepend'"),
        ({"decoder": {"type": "Metaspace"}}, "decoder 'Metaspace'"),
        ({"pre_tokenizer": None}, "pre-tokenizer 'null'"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre-tokenizer 'Metaspace'"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}}, "the pattern 'x'"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": ["ByteLevel"]}}, "pre-tokenizer 'ByteLevel' is not"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": ["Digits", TRIM]}}, "'Digits' is not"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": ["x"]}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}}, r"the pattern \['x'\]"),
        ({"normalizer": "NFC"}, "normalizer 'NFC' is not supported"),
        ({"normalizer": {"type": "Sequence", "normalizers": 5}}, "must hold a list of normalizers, got 5"),
        ({"decoder": "ByteLevel"}, "decoder 'ByteLevel' is not supported"),
        ({"added_tokens": [{"id": 999, "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"added_tokens": {"a": 1}}, "added_tokens must be a list"),
        ({"added_tokens": [{"id": True, "content": "<m>"}]}, "unusable id True"),
        ({"truncation": {"max_length": 512}}, "truncation is set"),
        ({"padding": {"strategy": "BatchLongest"}}, "padding is set"),
        ({"post_processor": {"type": "RobertaProcessing"}}, "post-processor 'RobertaProcessing'"),
        ({"post_processor": {**BOS_TEMPLATE, "single": BOS_TEMPLATE["single"][::-1]}}, "does not end with the text"),
        ({"post_processor": {**BOS_TEMPLATE, "special_tokens": {}}}, "before the text is not supported"),
        ({"post_processor": {**BOS_TEMPLATE, "special_tokens": {"<|a|>": {"ids": [9999]}}}},
         "prefix token id 9999 has no token"),
        ({"added_tokens": [{"id": 3}]}, "lacks its id or content"),
        ({"added_tokens": [{"id": 999, "content": "<m>", "lstrip": True}]}, "with lstrip"),
        ({"added_tokens": [{"id": 2, "content": "<m>", "special": True}]}, "id 2 is both"),
        ({"added_tokens": [{"id": 1 << 40, "content": "<m>"}]}, "unusable id"),
    ],
)  # fmt: skip
def test_tokenizer_json_that_cannot_be_used(change: dict[str, Any], message: str) -> None:
    content = {**json.loads(TRAINED["gpt2"].to_str()), **change}
    with pytest.raises(TokenizerError, match=message) as caught:
        Vocabulary.from_tokenizer_json(json.dumps(content).encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_any_value_anywhere_in_tokenizer_json_is_refused_in_one_line_or_harmless(kind: str) -> None:
    content = json.loads(TRAINED[kind].to_str())
    content["post_processor"] = {"type": "Sequence", "processors": [TRIM, BOS_TEMPLATE]}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    messages = refusals(
        lambda values: Tokenizer(Vocabulary.from_tokenizer_json(json.dumps(values).encode())),
        mutants(content),
        TokenizerError,
    )
    assert len(messages) > 500
    assert not [message for message in messages if "\n" in message]


def test_any_value_anywhere_in_gguf_fields_is_refused_in_one_line_or_harmless() -> None:
    tokens, types, merges = gguf_fields("gpt2")
    fields: dict[str, Any] = {"tokens": tokens, "token_types": types, "merges": merges, "pre": "gpt-2"}
    documents = [
        {**fields, name: mutant}
        for name, value in fields.items()
        for mutant in mutants(value)
        if isinstance(mutant, list) or name == "pre"  # the importer looks at that much
    ]
    messages = refusals(
        lambda document: Tokenizer(Vocabulary.from_gguf_fields(**document)), documents, TokenizerError
    )
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


@pytest.mark.parametrize(
    ("post_processor", "prefix"),
    [
        (None, ()),
        (TRIM, ()),
        (BOS_TEMPLATE, (0,)),
        ({"type": "Sequence", "processors": [TRIM, BOS_TEMPLATE]}, (0,)),
        ({"type": "Sequence", "processors": [BOS_TEMPLATE, TRIM]}, (0,)),
        ({**BOS_TEMPLATE, "single": BOS_TEMPLATE["single"][1:]}, ()),
    ],
)
def test_what_the_post_processor_puts_before_a_text_is_the_prefix(post_processor: Any, prefix: tuple[int, ...]) -> None:
    content = json.dumps({**json.loads(TRAINED["gpt2"].to_str()), "post_processor": post_processor})
    tokenizer = Tokenizer(Vocabulary.from_tokenizer_json(content.encode()))
    hub = HubTokenizer.from_str(content)
    hub.encode_special_tokens = True
    assert tokenizer.prefix_ids == prefix
    for text in ("the cat", "", "<|a|>"):
        assert tokenizer.encode_prompt(text) == hub.encode(text, add_special_tokens=True).ids
        assert tokenizer.encode(text) == hub.encode(text, add_special_tokens=False).ids


def test_gpt2_puts_nothing_before_a_text() -> None:
    assert Tokenizer.gpt2().encode_prompt("a") == Tokenizer.gpt2().encode("a")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_tokenizer_json_that_is_no_json_object(data: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"the tokenizer file"):
        Vocabulary.from_tokenizer_json(data)


def test_shipped_vocabulary_is_gpt2() -> None:
    lines = [base64.b64encode(token) + b" %d\n" % token_id for token, token_id in RANKS.items()]
    published = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # tiktoken's r50k_base
    assert hashlib.sha256(b"".join(lines)).hexdigest() == published


def test_tiktoken_ranks() -> None:
    lines = "\n".join(f"{base64.b64encode(token).decode()} {index}" for index, token in enumerate([b"a", b"b", b"ab"]))
    vocabulary = Vocabulary.from_tiktoken(lines, special={"<end>": 5})
    assert Tokenizer(vocabulary).encode("aab<end>"[:3]) == [0, 2]
    assert list(vocabulary.tokens) == [b"a", b"b", b"ab", b"", b"", b"<end>"]
    for fault in ("YQ==", "YQ== x", "YQ 0", "YQ== -1", "YQ== 0\nYg== 0", "=== 1"):
        with pytest.raises(TokenizerError, match=r"line [12] of the rank file"):
            Vocabulary.from_tiktoken(fault)
    with pytest.raises(TokenizerError, match="its id 0 is taken"):
        Vocabulary.from_tiktoken(lines, special={"<end>": 0})
    with pytest.raises(TokenizerError, match="unknown pre-tokenizer 'gpt5'"):
        Vocabulary.from_tiktoken(lines, "gpt5")


def small() -> Vocabulary:
    merges = np.array([[1, 2], [0, 1]], np.uint32)
    tokens = [b"a", b"b", b"c", b"bc", b"ab", b"", b"<s>", b"<t>"]
    return Vocabulary("smollm", tokens, frozenset([6]), frozenset([7]), merges, False, nfc=True, prefix_ids=(6, 0))


def test_the_file_keeps_everything() -> None:
    data = small().to_bytes()
    again = Vocabulary.from_bytes(data)
    assert again.to_bytes() == data
    assert (again.pattern, list(again.tokens)) == ("smollm", list(small().tokens))
    assert (again.special_tokens, again.added_tokens) == ({"<s>": 6}, {"<t>": 7})
    assert again.merges is not None
    assert again.merges.tolist() == [[1, 2], [0, 1]]
    assert (again.whole_pieces, again.nfc) == (False, True)
    assert Tokenizer(again).encode("abc<t><s>"[:6]) == [0, 3, 7]
    assert again.prefix_ids == (6, 0)
    assert Tokenizer(again).encode_prompt("a") == [6, 0, 0]
    plain = Vocabulary.from_bytes(Vocabulary("gpt2", [b"a"]).to_bytes())
    assert (plain.merges, plain.whole_pieces, plain.nfc, plain.prefix_ids) == (None, True, False, ())


PREFIX = b"\2\0\0\0" b"\6\0\0\0" b"\0\0\0\0" b"...."
"""The end of small()'s file: count and ids of its prefix, the checksum."""


def sealed(data: bytes) -> bytes:
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def test_truncated_and_corrupt_files_are_refused() -> None:
    data = small().to_bytes()
    for length in range(len(data)):
        with pytest.raises(TokenizerError, match=r"^some\.vocab: ") as caught:
            Vocabulary.from_bytes(data[:length], "some.vocab")
        assert "\n" not in str(caught.value)
    for position in range(len(data)):
        with pytest.raises(TokenizerError):
            Vocabulary.from_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
    with pytest.raises(TokenizerError, match="1 bytes after the end"):
        Vocabulary.from_bytes(data + b"x")


def changed(position: int, value: int) -> bytes:
    """The small file with one header field (0 version … 6 name length) changed and a checksum that is right."""
    data = bytearray(small().to_bytes())
    struct.pack_into("<I", data, 8 + 4 * position, value)
    return sealed(bytes(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF" + b"\0" * 60, "not a Crucible vocabulary file"),
        (changed(0, 2), "format version 2"),
        (changed(1, 64), "unknown flags 0x40"),
        (changed(2, 1 << 31), "truncated: the token lengths end at"),
        (changed(3, 1 << 31), "truncated: the merges end at"),
        (changed(6, 1 << 31), "truncated: the pre-tokenizer name end at"),
        (sealed(small().to_bytes().replace(b"smollm", b"sm\xfflm1")), "unknown pre-tokenizer"),
        (sealed(small().to_bytes()[:-20] + b"\x05\0\0\0" + PREFIX), "special token id 5 has no token"),
        (sealed(small().to_bytes()[:-20] + b"\x06\0\0\0" + PREFIX), "6 is both special and added"),
        (sealed(small().to_bytes()[:-8] + b"\x05\0\0\0...."), "prefix token id 5 has no token"),
        (sealed(small().to_bytes()[:-16] + b"\x09\0\0\0" + PREFIX[4:]), "the prefix tokens end at"),
    ],
)  # fmt: skip
def test_files_that_say_something_impossible(data: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Vocabulary.from_bytes(data)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (Vocabulary("gpt2", [b"a", b"a"]), "token 1 has the same bytes as another"),
        (Vocabulary("gpt2", [b"<s>", b"<s>"], frozenset([0, 1])), "have the same text '<s>'"),
        (Vocabulary("gpt2", [b"\xff"], frozenset([0])), "is not UTF-8 text"),
        (
            Vocabulary("gpt2", [b"a", b"b"], merges=np.array([[0, 1]], np.uint32)),
            "makes b'ab', which is no ordinary token",
        ),
        (Vocabulary("gpt2", [b"a", b"b"], merges=np.array([[0, 9]], np.uint32)), "names a token id past 1"),
    ],
)
def test_vocabularies_that_no_tokenizer_can_use(vocabulary: Vocabulary, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(vocabulary)


def test_a_token_too_long_for_the_file_is_refused() -> None:
    with pytest.raises(TokenizerError, match="token 0 has 65536 bytes"):
        Vocabulary("gpt2", [b"a" * 65536]).to_bytes()
