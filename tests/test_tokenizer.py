"""Ids against tiktoken, whose ranks are read back from the shipped vocabulary, and against Hugging Face tokenizers."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from crucible.errors import TokenizerError
from crucible.native.bpe import character_classes, pieces
from crucible.tokenizer import Tokenizer, Vocabulary

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "smollm": r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s",
    "llama3": LLAMA3,
    "qwen2": LLAMA3.replace("{1,3}", ""),
}
GPT2 = Tokenizer.gpt2()
RANKS = {GPT2.token_bytes(token_id): token_id for token_id in range(50256)}

# Fragments that the patterns treat specially, so that random sequences of them meet in every combination.
FRAGMENTS = [
    *"abSsTtlLvVeErRdDmM'’ \t\n\r\f\x0b\x00\x1c019,.!<|>_-$é日ſİK\xa0\u3000\u2028\u200b\x85²½Ⅷ٣😊\u0301\ufeff",
    *[
        "'s",
        "'LL",
        "'Ve",
        "'re",
        "'ſ",
        "'d ",
        "  ",
        "   ",
        "\r\n",
        "\n\n",
        " \n ",
        "the",
        " of",
        "ing",
        "<|endoftext|>",
    ],
]
fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


def oracle(pattern: str) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        pattern, pat_str=PATTERNS[pattern], mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": 50256}
    )


ORACLES = {pattern: oracle(pattern) for pattern in PATTERNS}
SAME_RANKS = {
    pattern: Tokenizer(Vocabulary(pattern, [*RANKS, b"<|endoftext|>"], frozenset([50256]))) for pattern in PATTERNS
}


def all_characters() -> str:
    return "".join(chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)


@pytest.mark.parametrize(("name", "value"), [("letter", 1), ("number", 2), ("space", 3)])
def test_character_classes_are_those_of_tiktoken(name: str, value: int) -> None:
    pattern = {"letter": r"\p{L}", "number": r"\p{N}", "space": r"\s"}[name]
    encoding = tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks={bytes([byte]): byte for byte in range(256)}, special_tokens={}
    )
    expected = bytes(encoding.encode_ordinary(all_characters())).decode()
    classes = np.frombuffer(character_classes(), np.uint8)
    assert len(classes) == 0x110000
    assert "".join(map(chr, np.flatnonzero(classes == value).tolist())) == expected


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_character(pattern: str) -> None:
    text = all_characters()
    assert SAME_RANKS[pattern].encode(text) == ORACLES[pattern].encode_ordinary(text)
    apart = " ".join(text[:0x3000]) + "'".join(text[0x1F000:0x20000])
    assert SAME_RANKS[pattern].encode(apart) == ORACLES[pattern].encode_ordinary(apart)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pieces_of_all_pairs_of_fragments(pattern: str) -> None:
    """Piece by piece: ids do not show every cut. The oracle is Hugging Face's regular expression engine."""
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated")
    for left, right in itertools.product(FRAGMENTS, repeat=2):
        for text in (left + right, f"x{left}{right}s", f"{left}{right}{left} e1"):
            expected = [piece.encode() for piece, _ in split.pre_tokenize_str(text)]
            assert pieces(pattern, text.encode()) == expected, text


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=400, deadline=None)
@given(text=fragments)
def test_fragments(pattern: str, text: str) -> None:
    assert SAME_RANKS[pattern].encode(text) == ORACLES[pattern].encode_ordinary(text)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_and_back(text: str) -> None:
    ids = GPT2.encode(text)
    assert ids == ORACLES["gpt2"].encode_ordinary(text)
    assert GPT2.decode(ids) == text
    assert GPT2.encode_array(text).tolist() == ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("The World is a stage", [464, 2159, 318, 257, 3800]),
        ("tab\tand  two", [8658, 197, 392, 220, 734]),
        ("I've, they'LL", [40, 1053, 11, 484, 6, 3069]),
        ("mañana — 12345", [2611, 12654, 2271, 851, 17031, 2231]),
        ("\n\n \n", [628, 220, 198]),
        ("nul\x00here", [77, 377, 188, 1456]),
        ("héllo 🦙", [71, 2634, 18798, 12520, 99, 247]),
    ],
)
def test_known_ids(text: str, ids: list[int]) -> None:
    assert GPT2.encode(text) == ids
    assert GPT2.decode(ids) == text


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    for text in ("a\ud83d", "\udc00\ud800", "\ud83d\ude00!", "x\udfffy<|endoftext|>"):
        assert GPT2.encode(text) == ORACLES["gpt2"].encode_ordinary(text)
    assert GPT2.encode("a\ud83d") == [64, 4210]


def test_special_text_is_ordinary_unless_allowed() -> None:
    text = "end<|endoftext|>begin<|endoftext|>"
    assert 50256 not in GPT2.encode(text)
    assert GPT2.encode(text, allow_special=True) == ORACLES["gpt2"].encode(text, allowed_special="all")
    assert list(GPT2.split_special(text)) == ["end", 50256, "begin", 50256]
    assert GPT2.special_tokens == {"<|endoftext|>": 50256}
    assert GPT2.decode([464, 50256]) == "The<|endoftext|>"
    assert GPT2.decode([464, 50256], skip_special=True) == "The"


SCRAPS = [
    b"a",
    b"the ",
    b" b",
    b" ",
    b"\n",
    b"\t",
    b"\r",
    b"\xc3",
    b"\xc3\xa9",
    b"\xe2\x80",
    b"\xff",
    b"\xed\xa0\x80",
    b"1",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_cut_off_bytes_join_the_last_piece_and_the_blanks_before_it(pattern: str) -> None:
    for parts in itertools.product(SCRAPS, repeat=3):
        data = b"".join(parts) + b"\xe2"
        assert SAME_RANKS[pattern].encode_bytes(data) == ORACLES[pattern]._encode_bytes(data), data


def test_cut_off_bytes_join_blanks_that_were_pieces_of_their_own() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"\n "]
    ranks = {token: token_id for token_id, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("blanks", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    tokenizer = Tokenizer(Vocabulary("llama3", tokens))
    assert tokenizer.encode("x\n ") == [*b"x\n "]
    assert tokenizer.encode_bytes(b"x\n \xff") == encoding._encode_bytes(b"x\n \xff") == [ord("x"), 256, 0xFF]


@settings(max_examples=500, deadline=None)
@given(data=st.one_of(st.binary(max_size=24), st.lists(st.sampled_from(SCRAPS), max_size=10).map(b"".join)))
def test_bytes_that_need_not_be_utf8(data: bytes) -> None:
    ids = GPT2.encode_bytes(data)
    assert ids == ORACLES["gpt2"]._encode_bytes(data)
    assert GPT2.decode_bytes(ids) == data


def test_whole_tokens_of_every_length_are_found_anywhere() -> None:
    """No merge makes these tokens: only the lookup of the whole piece finds them, near the end of the text or not."""
    words = ["a" + "bcdefgh"[length % 7] * (length - 1) for length in range(2, 40)]
    tokens = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)]
    tokenizer = Tokenizer(Vocabulary("gpt2", tokens, merges=np.empty((0, 2), np.uint32)))
    for index, word in enumerate(words):
        for after in ("", "!", "\n" + "later text " * 3):
            assert tokenizer.encode(word + after) == [256 + index, *after.encode()]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: "a" * n,
        lambda n: "^" * n,
        lambda n: " " * n + "end",
        lambda n: "日本語" * (n // 3),
        lambda n: "".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=n)),
    ],
    ids=["letters", "carets", "spaces", "kanji", "random word"],
)
def test_long_pieces_take_about_linear_time(make: Callable[[int], str]) -> None:
    short, long = make(100_000), make(1_000_000)
    assert GPT2.encode(short) == ORACLES["gpt2"].encode_ordinary(short)
    start = time.perf_counter()
    ids = GPT2.encode(long)
    assert time.perf_counter() - start < 5  # about 0.2 s; a quadratic loop takes minutes
    assert GPT2.decode(ids) == long


def test_ids_without_a_token_are_refused() -> None:
    for bad in (50257, 50303, -1, 1 << 70):
        with pytest.raises(TokenizerError, match=f"token id {bad} has no token"):
            GPT2.decode([464, bad])
        with pytest.raises(TokenizerError, match=f"token id {bad} "):
            GPT2.token_bytes(bad)


def test_gaps_between_ids_are_refused() -> None:
    tokenizer = Tokenizer(Vocabulary("gpt2", [b"a", b"", b"b"]))
    assert (tokenizer.token_count, tokenizer.decode([0, 2])) == (3, "ab")
    with pytest.raises(TokenizerError, match="token id 1 has no token"):
        tokenizer.decode([0, 1])
    with pytest.raises(TokenizerError, match="token id 1 has no token"):
        tokenizer.token_bytes(1)


def test_the_longest_special_token_wins() -> None:
    tokenizer = Tokenizer(Vocabulary("gpt2", [b"<", b">", b"<>", b"<>>"], frozenset([2, 3])))
    assert tokenizer.encode("<>><>", allow_special=True) == [3, 2]
    assert tokenizer.encode("<>><>") == [0, 1, 1, 0, 1]


def test_bytes_without_a_token_are_named() -> None:
    letters = Tokenizer(Vocabulary("gpt2", [bytes([byte]) for byte in b"ab \xc3<x>"] + [b"ab", b"<x>"], frozenset([8])))
    assert letters.encode("ab b") == [7, 2, 1]
    with pytest.raises(TokenizerError, match="byte 0x63 at byte offset 4 has no token"):
        letters.encode("ab bca")
    with pytest.raises(TokenizerError, match="byte 0xa9 at byte offset 1 has no token"):
        letters.encode("é")
    with pytest.raises(TokenizerError, match="byte 0x63 at byte offset 6 has no token"):
        letters.encode("ab <x>c", allow_special=True)
    with pytest.raises(TokenizerError, match="byte 0xff at byte offset 3 has no token"):
        letters.encode_bytes(b"ab \xff")
    with pytest.raises(TokenizerError, match="byte 0x63 at byte offset 0 has no token"):
        letters.encode_array("c")


def test_threads_share_a_tokenizer() -> None:
    texts = [
        " ".join(random.Random(seed).choices(["zyx", "qwertyuiop", "日本", "unforgivable"], k=20_000))
        for seed in range(4)
    ]
    expected = [ORACLES["gpt2"].encode_ordinary(text) for text in texts]
    results: list[list[int]] = [[]] * 4

    def work(index: int) -> None:
        results[index] = GPT2.encode(texts[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_files_are_found_beside_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        Tokenizer.for_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(TokenizerError, match=r"tokenizer.json: tokenizer model 'Unigram' is not supported"):
        Tokenizer.for_checkpoint(tmp_path)
    (tmp_path / "tokenizer.vocab").write_bytes(Vocabulary("gpt2", [b"a", b"b"]).to_bytes())
    assert Tokenizer.for_checkpoint(tmp_path).encode("ab") == [0, 1]
    with pytest.raises(TokenizerError, match=r"nothing\.vocab: No such file"):
        Tokenizer.from_file(tmp_path / "nothing.vocab")
